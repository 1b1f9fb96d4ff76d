"""Exhaust the named worlds one after the other, or print what breaks."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from disagg.checking.explorer.small_worlds import SMALL_WORLDS
from disagg.checking.explorer.worlds import WORLDS, explore, num_states

Report = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m disagg.checking`.

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
    return exhaust(given.full, given.world or [], lambda line: print(line, flush=True))


def exhaust(full: bool, names: Sequence[str], report: Report) -> int:
    """Explore one world after the other and report each.

    Args:
        full: also the worlds that are too large for `make test`.
        names: these worlds only; empty means all.
        report: is given one line per world, or the trace of what breaks.

    Returns:
        The exit code: 0 if every world is exhausted, else 1.
    """
    chosen = names or list(WORLDS if full else SMALL_WORLDS)
    sound = []
    for number, name in enumerate(chosen, 1):
        _progress(f"{number} of {len(chosen)}: {name}, {num_states(name)} states")
        sound.append(_exhaust(name, report))
    return 0 if all(sound) else 1


def _exhaust(name: str, report: Report) -> bool:
    started = time.monotonic()
    seen = explore(WORLDS[name])
    _progress("")
    if seen.problem:
        report(f"{name}: {seen}")
        return False
    verdict = "EXHAUSTED" if seen.exhausted else "NOT exhausted"
    took = time.monotonic() - started
    report(f"{name}: {seen.num_states:,} states, {seen.num_steps:,} steps, {verdict}, {took:.1f} s")
    return seen.exhausted


def _progress(line: str) -> None:
    """Show what goes on, where there is a terminal; the next line takes its place."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
