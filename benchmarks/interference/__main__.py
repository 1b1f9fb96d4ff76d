"""Running decodes while long prompts arrive: with and without hand-over, on the same two cores.

Four streams decode all the time (prompts of 200 tokens, answers of 400), first alone, then while
prompts of 4,000 to 8,000 tokens arrive at times that do not depend on the answers. Measured of the
streams: time between tokens, tokens/s, time to the first token; of the long prompts, which lose
where only one of two workers computes them: time to the first token. Systems, a start each, in
turn: one worker of both roles with both cores, 1P1D and two workers of both roles with a core each;
all compute prefills in chunks of at most 512 tokens beside what decodes. The router and the client
take part of the same two cores.

    python -m benchmarks.interference --setup      .venv-vllm, as `make install-vllm` makes it
    python -m benchmarks.interference [--quick] [--engine native]

Greedy tokens are compared with plain transformers first. A JSON line per figure on standard output,
then the README's table on standard error.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.interference.figures import Measured, report, table
from benchmarks.interference.load import Load, run
from benchmarks.servers.environment import PYTHON, set_up, vllm_release
from benchmarks.serving.checkpoint import make_checkpoint
from benchmarks.serving.right_answer import check, right_answer
from benchmarks.serving.systems import Disagg, warm_up

VOCAB_SIZE = 32_000
NUM_CORES = 2
ONE, PAIR, TWO = "one worker of both roles", "1P1D", "two workers of both roles"
PAIRS = ((PAIR, ONE), (PAIR, TWO), (TWO, ONE))


def main() -> None:
    """Measure, print the figures and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--setup", action="store_true", help="make install-vllm, and end")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--engine", choices=("vllm", "native"), default="vllm", help="of disagg")
    parser.add_argument("--rounds", type=int, default=3, help="of all systems (default 3)")
    parser.add_argument("--seconds", type=float, default=120, help="of a disturbed part (120)")
    parser.add_argument("--every", type=float, default=15, help="mean between long prompts (15)")
    parser.add_argument("--python", type=Path, help="interpreter for the workers")
    given = parser.parse_args()
    if given.setup:
        set_up()
        return
    python = given.python or (PYTHON if given.engine == "vllm" else Path(sys.executable))
    if given.engine == "vllm":
        vllm_release(python, "benchmarks.interference", "\nor measure --engine native")
    _stay_on_two_cores()
    lasts_s, num_rounds = (2.5 * given.every, 1) if given.quick else (given.seconds, given.rounds)
    disturbed = Load(lasts_s, given.every)
    measured = {name: Measured() for name in (ONE, PAIR, TWO)}
    with tempfile.TemporaryDirectory(prefix="disagg-interference-") as folder:
        checkpoint = Path(folder) / "checkpoint"
        checkpoint.mkdir()
        make_checkpoint(checkpoint, VOCAB_SIZE)
        asked = right_answer(checkpoint, VOCAB_SIZE)
        for number in range(num_rounds):
            for name, one in measured.items():
                system = _system(name, checkpoint, python, Path(folder), given.engine)
                _say(f"round {number + 1}: {name} starts")
                system.start()
                try:
                    check(system, asked)
                    _measure(system, disturbed, number, one)
                finally:
                    system.end()
    note = (
        f"{given.engine} engine; {disturbed.num_streams} streams of {disturbed.prompt_tokens} + "
        f"{disturbed.num_output_tokens} tokens, prompts of {disturbed.long_tokens[0]} to "
        f"{disturbed.long_tokens[1]} tokens every {disturbed.every_s:g} s, for "
        f"{disturbed.lasts_s:g} s; medians of rounds"
    )
    for ours, peer in PAIRS:
        report(ours, peer, measured, note)
    _say(table(measured))


def _measure(system: Disagg, disturbed: Load, number: int, measured: Measured) -> None:
    warm_up(system, VOCAB_SIZE)
    calm = Load(disturbed.lasts_s / 3, every_s=0.0)
    alone = asyncio.run(run(calm, 2 * number, VOCAB_SIZE, system.ask))
    before_s = system.cpu_s()
    seen = asyncio.run(run(disturbed, 2 * number + 1, VOCAB_SIZE, system.ask))
    measured.add(alone, seen, system.cpu_s() - before_s)
    _say(f"  {alone.tokens_per_s:.0f}, then {seen.tokens_per_s:.0f} tokens/s")
    _say(f"  long prompts after {[round(one / 1e3, 1) for one in seen.long_first_ms]} s")


def _system(name: str, checkpoint: Path, python: Path, logs: Path, engine: str) -> Disagg:
    if name == PAIR:
        return Disagg(checkpoint, python, logs, engine=engine, prefill=1, decode=1)
    if name == TWO:
        return Disagg(checkpoint, python, logs, engine=engine, both=2)
    return Disagg(checkpoint, python, logs, engine=engine, both=1, num_threads=NUM_CORES)


def _stay_on_two_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < NUM_CORES:
        sys.exit(f"{NUM_CORES} cores are needed, there is {len(cores)}")
    os.sched_setaffinity(0, cores[:NUM_CORES])  # what is started inherits it


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
