"""TTFT, TPOT and ITL as ``vllm bench serve`` reports them: colocated, 1P1D, and vLLM's own server.

The client is vLLM's, unmodified; requests arrive by a Poisson process with the same prompts and
moments for all systems. These are one worker of both roles, vLLM's server with one engine, 1P1D,
and two workers of both roles, which have as many processes as 1P1D. Each is started as its users
start it and ends before the next one starts; rounds alternate them; greedy tokens are compared with
plain transformers first. vLLM as 1P1D is left out: its client has to ask both engines, which this
one does not. vLLM is unhindered (see `benchmarks.servers.vllm`).

    python -m benchmarks.serve_bench [--setup] [--quick] [--rounds N]
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.serve_bench.client import (
    METRICS,
    STATISTICS,
    Load,
    bench_serve,
    check_result,
    statistics_of,
)
from benchmarks.servers.environment import PYTHON, set_up, vllm_release
from benchmarks.serving.checkpoint import make_checkpoint
from benchmarks.serving.right_answer import check, right_answer
from benchmarks.serving.systems import Disagg, System, Vllm, warm_up
from benchmarks.transfer.figures import figure

VOCAB_SIZE = 32_000
LOADS = (Load(200, 64, 0.8, 120), Load(1_500, 64, 0.25, 40))
QUICK = (Load(200, 32, 0.5, 24),)
ONE, VLLM, PAIR, TWO = (
    "one worker of both roles",
    "vLLM 0.32, one engine",
    "1P1D",
    "two workers of both roles",
)
PAIRS = ((ONE, VLLM), (PAIR, TWO), (PAIR, ONE))

Results = dict[tuple[Load, str], list[dict[str, float]]]


def main() -> None:
    """Measure, print the figures, then the table on standard error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--setup", action="store_true", help="make install-vllm first")
    parser.add_argument("--quick", action="store_true", help="one load, one round")
    parser.add_argument("--rounds", type=int, default=3, help="of all systems (default 3)")
    parser.add_argument("--engine", choices=("vllm", "native"), default="vllm", help="of disagg")
    parser.add_argument("--python", type=Path, default=PYTHON, help="interpreter with vLLM")
    given = parser.parse_args()
    if given.setup:
        set_up()
    vllm_release(given.python, "benchmarks.serve_bench")
    loads, rounds = (QUICK, 1) if given.quick else (LOADS, given.rounds)
    results: Results = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="disagg-serve-bench-") as folder:
        measure(loads, rounds, Path(folder), given.python, given.engine, results)
    for load in loads:
        report(load, results, given.engine)
    print(table(loads, results), file=sys.stderr)


def measure(
    loads: tuple[Load, ...], rounds: int, folder: Path, python: Path, engine: str, results: Results
) -> None:
    """Let every system serve the loads in every round."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    make_checkpoint(checkpoint, VOCAB_SIZE)
    asked = right_answer(checkpoint, VOCAB_SIZE)
    for number in range(rounds):
        for name, make in systems(checkpoint, python, folder, engine).items():
            system = make()
            print(f"round {number + 1}: {name} starts", file=sys.stderr, flush=True)
            start_s = system.start()
            try:
                check(system, asked)
                warm_up(system, VOCAB_SIZE)
                print(f"  served after {start_s:.0f} s", file=sys.stderr, flush=True)
                for load in loads:
                    result = bench_serve(
                        python, system.url, load.options(number), checkpoint, folder / "result.json"
                    )
                    check_result(result, load)
                    results[load, name].append(statistics_of(result))
                    seen = {"system": name, "load": load.name, **results[load, name][-1]}
                    print(json.dumps(seen), file=sys.stderr, flush=True)
            finally:
                system.end()


def systems(
    checkpoint: Path, python: Path, logs: Path, engine: str
) -> dict[str, Callable[[], System]]:
    """What is measured, in turn."""

    def ours(**workers: int) -> Callable[[], System]:
        return lambda: Disagg(checkpoint, python, logs, engine=engine, **workers)

    return {
        ONE: ours(both=1),
        VLLM: lambda: Vllm(checkpoint, python, logs),
        PAIR: ours(prefill=1, decode=1),
        TWO: ours(both=2),
    }


def report(load: Load, results: Results, engine: str) -> None:
    """Print a figure per pair, metric and statistic; a ratio above 1: the first is faster."""
    note = f"{engine} engine; {load.num_prompts} requests, Poisson; vllm bench serve"
    for ours, peer in PAIRS:
        for metric in METRICS:
            for statistic in STATISTICS:
                name = f"{statistic}_{metric}_ms"
                figure(
                    f"{load.name}: {ours}, {metric.upper()} {statistic}",
                    [one[name] for one in results[load, ours]],
                    [one[name] for one in results[load, peer]],
                    unit="ms",
                    target=None,
                    peer_name=peer,
                    note=note,
                )


def table(loads: tuple[Load, ...], results: Results) -> str:
    """The table of docs/benchmarks/engines.md, medians of rounds."""
    columns = [f"{metric.upper()} mean / median / P99 ms" for metric in METRICS]
    lines = [f"| load | system | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for load in loads:
        for name in (ONE, VLLM, PAIR, TWO):
            cells = [
                " / ".join(
                    f"{median(one[f'{statistic}_{metric}_ms'] for one in results[load, name]):.0f}"
                    for statistic in STATISTICS
                )
                for metric in METRICS
            ]
            lines.append(f"| {load.name} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
