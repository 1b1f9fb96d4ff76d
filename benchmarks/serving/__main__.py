"""Serving beside vLLM: the same checkpoint, threads and requests, tokens/s and CPU seconds of all.

Each system is started as its users start it, serves all rows, and ends before the next one starts:
on few cores an idle neighbour would take part. Rounds alternate the systems. vLLM is unhindered:
its polling and spinning threads sleep, and its models are not pinned to one core (see
`benchmarks.servers.vllm`); what a user gets without that is slower.

    python -m benchmarks.serving [--setup] [--quick]

Targets: one worker of both roles at least vLLM's tokens/s and tokens per CPU second in every row;
1P1D at least 1.1 times vLLM's 1P1D in tokens/s, and at 4 streams and more its first and second
token after at most 0.83 of the time; its hand-over waits for one step at most.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.servers.environment import PYTHON, check_python, set_up
from benchmarks.serving.checkpoint import make_checkpoint
from benchmarks.serving.load import Cell, Times, run_cell
from benchmarks.serving.systems import Disagg, System, Vllm, VllmPair, warm_up
from benchmarks.transfer.figures import figure

SHAPES = [(1, 200, 4), (1, 1_500, 3), (1, 8_000, 1), (4, 200, 4), (4, 1_500, 2), (16, 200, 2),
          (16, 1_500, 1), (64, 200, 1)]  # fmt: skip
"""Streams, tokens of a prompt, requests of each stream."""
CELLS = [
    *(Cell(*shape[:2], False, 32_000, shape[2]) for shape in SHAPES),
    *(Cell(*shape[:2], True, 32_000, shape[2]) for shape in SHAPES if shape[1] == 200),
    *(Cell(num, 200, sampled, 262_144, 2) for num in (4, 16) for sampled in (False, True)),
]
HANDOVER_STEPS_MAX = 1.0
QUICK = [Cell(1, 200, False, 32_000, 2), Cell(4, 200, True, 32_000, 2)]


@dataclass
class Measured:
    """Samples of one system in one row, one per round."""

    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_cpu_s: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    second_ms: list[float] = field(default_factory=list)
    per_token_ms: list[float] = field(default_factory=list)
    waited_steps: list[float] = field(default_factory=list)
    """Between first and second token, beyond the step that computes the second."""

    def add(self, times: Times, cpu_s: float) -> None:
        """Add a round."""
        self.tokens_per_s.append(times.num_tokens / times.wall_s)
        self.tokens_per_cpu_s.append(times.num_tokens / cpu_s)
        self.first_ms.append(statistics.median(times.first_ms))
        self.second_ms.append(statistics.median(times.second_ms))
        self.per_token_ms.append(statistics.median(times.per_token_ms))
        gaps = [b - a for a, b in zip(times.first_ms, times.second_ms, strict=True)]
        waited = statistics.median(gaps) / self.per_token_ms[-1] - 1
        self.waited_steps.append(max(0.01, waited))  # a ratio is made of it


Results = dict[tuple[Cell, str], Measured]


def main() -> None:
    """Measure, print the figures; exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--setup", action="store_true", help="install vLLM first")
    parser.add_argument("--quick", action="store_true", help="two rows, one round")
    parser.add_argument("--rounds", type=int, default=3, help="of all systems (default 3)")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rows whose name has such a text, as '4 x 200'"
    )
    parser.add_argument("--python", type=Path, default=PYTHON, help="interpreter with vLLM")
    given = parser.parse_args()
    if given.setup:
        set_up()
    check_python(given.python, "benchmarks.serving")
    results: Results = defaultdict(Measured)
    cells, rounds = (QUICK, 1) if given.quick else (CELLS, given.rounds)
    cells = [cell for cell in cells if any(text in cell.name for text in given.only)]
    if not cells:
        sys.exit(f"no row has any of {given.only} in its name")
    with tempfile.TemporaryDirectory(prefix="disagg-serving-") as folder:
        for vocab_size in sorted({cell.vocab_size for cell in cells}):
            measure(
                [cell for cell in cells if cell.vocab_size == vocab_size],
                rounds,
                Path(folder) / str(vocab_size),
                given.python,
                results,
            )
    ok = [report(cell, results) for cell in cells]
    print(table(cells, results), file=sys.stderr)
    raise SystemExit(not all(ok))


def measure(cells: list[Cell], rounds: int, folder: Path, python: Path, results: Results) -> None:
    """Let every system serve the cells, which have one vocabulary, in every round."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    make_checkpoint(checkpoint, cells[0].vocab_size)
    for number in range(rounds):
        for make in SYSTEMS:
            system = make(checkpoint, python, folder)
            print(f"round {number + 1}: {system.name} starts", file=sys.stderr, flush=True)
            start_s = system.start()
            try:
                warm_up(system, cells[0].vocab_size)
                print(f"  served after {start_s:.0f} s", file=sys.stderr, flush=True)
                for cell in cells:
                    before_s = system.cpu_s()
                    times = asyncio.run(run_cell(cell, number, system.ask))
                    results[cell, system.name].add(times, system.cpu_s() - before_s)
                    print(f"  {cell.name}: {times.wall_s:.1f} s", file=sys.stderr, flush=True)
            finally:
                system.end()


def _one(checkpoint: Path, python: Path, logs: Path) -> System:
    return Disagg(checkpoint, python, logs, both=1)


def _two(checkpoint: Path, python: Path, logs: Path) -> System:
    return Disagg(checkpoint, python, logs, both=2)


def _pair(checkpoint: Path, python: Path, logs: Path) -> System:
    return Disagg(checkpoint, python, logs, prefill=1, decode=1)


SYSTEMS: list[Callable[[Path, Path, Path], System]] = [Vllm, _one, VllmPair, _pair, _two]


def measured(cell: Cell, results: Results) -> list[Measured]:
    """A row's samples in the order of `SYSTEMS`."""
    return [one for (at, _), one in results.items() if at == cell]


def table(cells: list[Cell], results: Results) -> str:
    """The table of docs/benchmarks/engines.md, medians."""
    middle = statistics.median
    lines = [
        "| row | one worker of both roles: tokens/s (vLLM) | of its tokens per CPU s"
        " | 1P1D: tokens/s (vLLM) | first token ms | second token ms | hand-over, steps"
        " | two workers of both roles: tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        alone, one, pair, ours, two = measured(cell, results)
        per_cpu_s = middle(one.tokens_per_cpu_s) / middle(alone.tokens_per_cpu_s)
        lines.append(
            f"| {cell.name} | {middle(one.tokens_per_s):.1f} ({middle(alone.tokens_per_s):.1f})"
            f" | {per_cpu_s:.2f}"
            f" | {middle(ours.tokens_per_s):.1f} ({middle(pair.tokens_per_s):.1f})"
            f" | {middle(ours.first_ms):.0f} ({middle(pair.first_ms):.0f})"
            f" | {middle(ours.second_ms):.0f} ({middle(pair.second_ms):.0f})"
            f" | {middle(ours.waited_steps):.2f} | {middle(two.tokens_per_s):.1f} |"
        )
    return "\n".join(lines)


def report(cell: Cell, results: Results) -> bool:
    """Print a row's figures; returns whether its targets were reached."""
    alone, one, pair, ours, two = measured(cell, results)
    many = cell.num_streams >= 4
    about = "64 output tokens; medians of rounds"
    ok = []
    for ours_here, peer, ours_name, peer_name, rate, waits in (
        (one, alone, "one worker of both roles", Vllm.name, 1.0, None),
        (ours, pair, "1P1D", VllmPair.name, 1.1, 1 / 0.83 if many else None),
        (two, pair, "two workers of both roles", VllmPair.name, None, None),
        (ours, two, "1P1D", "two workers of both roles of ours", None, None),
    ):
        name = f"{cell.name}: {ours_name}"
        same: dict[str, Any] = {"peer_name": peer_name, "note": about}
        ok.append(
            figure(
                f"{name}, tokens/s",
                ours_here.tokens_per_s,
                peer.tokens_per_s,
                unit="tokens/s",
                target=rate,
                higher_is_better=True,
                **same,
            )
        )
        ok.append(
            figure(
                f"{name}, tokens per CPU second",
                ours_here.tokens_per_cpu_s,
                peer.tokens_per_cpu_s,
                unit="tokens/s",
                target=1.0 if ours_here is one else None,
                higher_is_better=True,
                **same,
            )
        )
        for what, mine, theirs in (
            ("first token", ours_here.first_ms, peer.first_ms),
            ("second token", ours_here.second_ms, peer.second_ms),
        ):
            ok.append(figure(f"{name}, {what}", mine, theirs, unit="ms", target=waits, **same))
        ok.append(
            figure(
                f"{name}, time per further token",
                ours_here.per_token_ms,
                peer.per_token_ms,
                unit="ms",
                target=None,
                **same,
            )
        )
    ok.append(
        figure(
            f"{cell.name}: hand-over of 1P1D, beyond the second token's step",
            ours.waited_steps,
            [HANDOVER_STEPS_MAX],
            unit="steps",
            target=1.0,
            peer_name="the bound",
            note=about,
        )
    )
    return all(ok)


if __name__ == "__main__":
    main()
