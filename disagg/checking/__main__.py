"""`python -m disagg.checking`: exhaust the worlds one after the other, or print what breaks."""

import argparse
import sys
import time
from collections.abc import Sequence

from disagg.checking.explorer.large_worlds import WORLDS
from disagg.checking.explorer.small_worlds import SMALL_WORLDS
from disagg.checking.explorer.world import World


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore the worlds that were asked for.

    Returns:
        The exit code: 0 if every world is exhausted, else 1.
    """
    parser = argparse.ArgumentParser(
        "python -m disagg.checking",
        description="Exhaust everything that can happen in small worlds of whole workers, breadth "
        "first, or print the shortest trace to a broken promise. docs/worlds.md describes them.",
    )
    parser.add_argument("--full", action="store_true", help="the large worlds too (minutes)")
    parser.add_argument(
        "--world",
        metavar="NAME",
        action="append",
        choices=list(WORLDS),
        help="this world only; may be given again",
    )
    given = parser.parse_args(arguments)
    names = given.world or list(WORLDS if given.full else SMALL_WORLDS)
    return 0 if all([exhausts(name) for name in names]) else 1


def exhausts(name: str) -> bool:
    """Explore a world and report it in one line, or by the trace of what breaks."""
    _progress(name)
    started = time.monotonic()
    seen = World(WORLDS[name][-1]).explore()
    _progress("")
    if seen.problem:
        print(f"{name}: {seen}", flush=True)
        return False
    verdict = "EXHAUSTED" if seen.exhausted else "NOT exhausted"
    took = time.monotonic() - started
    states = f"{seen.num_states:,} states, {seen.num_steps:,} steps"
    print(f"{name}: {states}, {verdict}, {took:.1f} s", flush=True)
    return seen.exhausted


def _progress(line: str) -> None:
    """Show what goes on, where there is a terminal; the next line takes its place."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
