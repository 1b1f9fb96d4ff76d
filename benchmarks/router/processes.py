"""Router processes that share a port: ``python -m benchmarks.router.processes [--quick]``.

Small requests without streaming as in `benchmarks.router`, over 64 connections, to a router of one
process and to one of two, by turns: CPU of all of its processes per request, and requests per
second. Workers and client want cores as well: on a machine of few the second figure says how much
the processes leave them, not how much they could do.
``--quick``: one round, shorter.
"""

import argparse
import asyncio
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.router.__main__ import (
    MEASURED_S,
    QUICK_ROUNDS,
    QUICK_S,
    ROUNDS,
    US,
    measure,
    workers_of,
)
from benchmarks.router.checkpoint import make_checkpoint
from benchmarks.router.environment import OURS
from benchmarks.router.load import request
from benchmarks.transfer.figures import figure

NUM_CALLERS = 64
NUM_PROCESSES = (1, 2)


def main() -> None:
    """Print a line per number of processes for the CPU, and one for the rate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, shorter")
    quick = parser.parse_args().quick
    measured_s = QUICK_S if quick else MEASURED_S
    cpu_us: dict[int, list[float]] = defaultdict(list)
    per_s: dict[int, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = make_checkpoint(Path(temporary) / "model")
        for number in range(QUICK_ROUNDS if quick else ROUNDS):
            for num in NUM_PROCESSES:
                folder = Path(temporary) / f"{num}-{number}"
                folder.mkdir()
                with workers_of(OURS, 0.0, checkpoint, folder, num_processes=num) as router:
                    data = request(router.url, num_tokens=2, stream=False)
                    asked = measure(router, data, NUM_CALLERS, stream=False, measured_s=measured_s)
                    cpu_s, num_answers, _ = asyncio.run(asked)
                cpu_us[num].append(cpu_s * US / max(1, num_answers))
                per_s[num].append(num_answers / measured_s)
    for what, unit, found in (("CPU", "us", cpu_us), ("rate", "requests/s", per_s)):
        for num in NUM_PROCESSES:
            figure(
                f"router/per request, {NUM_CALLERS} at once, {num} processes, {what}",
                found[num],
                found[1] if num > 1 else None,
                unit=unit,
                target=None,
                peer_name="one process" if num > 1 else None,
                note="all processes together",
                higher_is_better=what == "rate",
            )


if __name__ == "__main__":
    main()
