"""Tiers beside plain copies and reads: ``python -m benchmarks.tiers [--quick] [--dir DIR]``.

GB/s from the pool into each tier and back, through the threads that a worker has for it, beside the
same bytes copied, read and written by as many plain threads, and through NIXL's plugin for files;
then decode steps while a tier writes, and the time to the first token of prompts that come back
from a tier beside computing them again. A JSON line per figure, ratio above 1 is better than the
peer; the exit code is 1 if a target is missed: 0.8 of the plain copy or read, steps within 10 %.
``--dir`` is on the device to be measured. vLLM's worker for offloading to host memory takes GPU
tensors alone, so it is no peer on a machine without one.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.tiers import first_token, rates, steps

PARTS = ("rates", "steps", "first_token")
KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = (64 * KIB, 512 * KIB, 2 * MIB)
TOTAL_BYTES, QUICK_BYTES = 256 * MIB, 64 * MIB
ROUNDS, QUICK_ROUNDS = 9, 3
SECONDS, QUICK_SECONDS = 4.0, 1.5


def main() -> int:
    """Print the figures; the exit code is 1 if one misses its target."""
    parser = argparse.ArgumentParser(prog="benchmarks.tiers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer bytes and rounds")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts of it")
    parser.add_argument("--dir", type=Path, default=None, help="where files are written")
    given = parser.parse_args()
    rounds = QUICK_ROUNDS if given.quick else ROUNDS
    reached = True
    with tempfile.TemporaryDirectory(dir=given.dir, prefix="disagg-tiers-") as folder:
        for block_bytes in BLOCK_BYTES if "rates" in given.only else ():
            num_blocks = (QUICK_BYTES if given.quick else TOTAL_BYTES) // block_bytes
            reached &= rates.measure(Path(folder), rates.Sizes(block_bytes, num_blocks, rounds))
        seconds = QUICK_SECONDS if given.quick else SECONDS
        if "steps" in given.only:
            reached &= steps.measure(Path(folder), rounds, seconds)
        lengths = first_token.QUICK_LENGTHS if given.quick else first_token.LENGTHS
        if "first_token" in given.only:
            first_token.measure(Path(folder), rounds, lengths)
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
