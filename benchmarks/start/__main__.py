"""Seconds until processes serve, and what memory they then hold.

``python -m benchmarks.start [--quick] [--rounds N] [--model DIR] [--router-only]``: a router
beside the same router in a process that has torch, as it was when transformers imported that: both
take turns in every round, after one that is not counted. Then a whole machine (``disagg serve``
with a prefill and a decode worker, idle), process by process, and ``disagg --help``. A figure is
the median of the rounds, beside the least and the largest; CPU seconds tell more than seconds
where the machine is shared. Ray may have started a worker's process some time before it became
one: its seconds are an upper bound. The model is tiny: its weights and KV pool count for nothing,
and its tokenizer for little. Target of the router: 3 s and 150 MiB RSS.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.engine.checkpoint import make_checkpoint
from benchmarks.start.process_figures import UNITS, Taken
from benchmarks.start.systems import WAYS, run_command, start_machine, start_router
from benchmarks.transfer.figures import load

ROUNDS, QUICK_ROUNDS = 5, 1
TARGETS = {"start_s": 3.0, "rss_mib": 150.0}
"""Of the router; at most so much."""


def line(
    name: str, unit: str, ours: list[float], peer: list[float] | None, target: float | None
) -> dict[str, object]:
    """A figure; a ratio above 1 is better than the peer."""
    value, other = statistics.median(ours), statistics.median(peer) if peer else None
    return {
        "name": f"start/{name}",
        "ours": round(value, 2),
        "peer": None if other is None else round(other, 2),
        "unit": unit,
        "ratio": None if other is None else round(other / value, 3),
        "spread": [[round(min(v), 2), round(max(v), 2)] for v in (ours, peer) if v],
        "rounds": len(ours),
        "target": target,
        "ok": None if target is None else value <= target,
        "peer_name": None if other is None else "the same router with torch",
        "load": load(),
    }


def router_lines(taken: dict[str, list[Taken]]) -> list[dict[str, object]]:
    """The router's figures beside the peer's."""
    ours, peer = (taken[way] for way in WAYS)
    return [
        line(
            "router",
            unit,
            [getattr(one, field) for one in ours],
            [getattr(one, field) for one in peer],
            TARGETS.get(field),
        )
        for field, unit in UNITS.items()
    ]


def machine_lines(rounds: list[dict[str, Taken]]) -> list[dict[str, object]]:
    """The figures of every process that all rounds had."""
    return [
        line(f"machine, {name}", unit, [getattr(one[name], field) for one in rounds], None, None)
        for name in rounds[0]
        for field, unit in UNITS.items()
    ]


def command_lines(taken: list[Taken]) -> list[dict[str, object]]:
    """The figures of a command that ends."""
    units = {"start_s": "s", "cpu_s": "s of CPU"}
    return [
        line("disagg --help", unit, [getattr(one, field) for one in taken], None, None)
        for field, unit in units.items()
    ]


def figures(
    rounds: int, checkpoint: Path, folder: Path, *, router_only: bool
) -> list[dict[str, object]]:
    """All lines."""
    routers: dict[str, list[Taken]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS:
            taken = start_router(way, checkpoint, folder)
            if number:
                routers[way].append(taken)
    found = router_lines(routers)
    if not router_only:
        found += machine_lines(
            [start_machine(checkpoint, _folder(folder, n)) for n in range(rounds)]
        )
    return found + command_lines([run_command("--help") for _ in range(rounds)])


def _folder(folder: Path, number: int) -> Path:
    """A log of its own for every round: lines of it are waited for."""
    own = folder / str(number)
    own.mkdir()
    return own


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", type=Path, help="a checkpoint, instead of a tiny one")
    parser.add_argument("--router-only", action="store_true", help="no machine with workers")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = given.model or make_checkpoint(
            Path(name) / "tiny", num_layers=2, hidden_size=64, vocab_size=512
        )
        lines = figures(
            QUICK_ROUNDS if given.quick else given.rounds,
            model,
            Path(name),
            router_only=given.router_only,
        )
    for one in lines:
        print(json.dumps(one))
    if any(one["ok"] is False for one in lines):
        raise SystemExit(1)
