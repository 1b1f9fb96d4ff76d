"""Blocks and bytes that a hand-over pulls, for model shapes and prompt lengths.

``python -m benchmarks.transfer_bytes [--quick]`` prints one JSON line per figure. Nothing is
timed; the numbers are the same on every machine. What is pulled is compared with the fewest blocks
that attention can do with, and with moving every layer of what the decode worker has not cached:
what a peer with a prefix cache and without windows would move. What the prefix cache saves by
itself is a line of its own.
"""

import argparse
import json

from benchmarks.transfer_bytes.figures import LENGTHS, QUICK_LENGTHS, document, figures, hand_overs


def main() -> int:
    """Print the figures; the exit code is 1 if one misses its target."""
    parser = argparse.ArgumentParser(prog="benchmarks.transfer_bytes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="prompts up to 8,000 tokens only")
    parser.add_argument("--table", action="store_true", help="the document's table instead")
    given = parser.parse_args()
    results = list(hand_overs(QUICK_LENGTHS if given.quick else LENGTHS))
    if given.table:
        print(document(results), end="")
        return 0
    lines = [line for one in results for line in figures(one)]
    for line in lines:
        print(json.dumps(line))
    return 0 if all(line["ok"] for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
