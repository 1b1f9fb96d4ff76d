"""`disagg explore`: exhaust the worlds of the transfer protocol, or print what breaks."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from disagg.errors import ConfigError

if TYPE_CHECKING:
    from disagg.checking.explorer.worlds import World


def explore(
    full: Annotated[bool, typer.Option("--full", help="The large worlds too (minutes).")] = False,
    world: Annotated[
        list[str] | None, typer.Option("--world", metavar="NAME", help="This world only.")
    ] = None,
) -> None:
    """Exhaust everything that can happen to a transfer in small worlds, or print what breaks."""
    raise typer.Exit(explore_worlds(full, world or [], lambda line: print(line, flush=True)))


def explore_worlds(full: bool, names: list[str], report: Callable[[str], None]) -> int:
    """Explore one world after the other and report each.

    Args:
        full: also the worlds that are too large for `make test`.
        names: these worlds only; empty means all.
        report: is told one line per world, or the trace of what breaks.

    Returns:
        The exit code: 0 if every world is exhausted, else 1.

    Raises:
        ConfigError: a world is not known.
    """
    from disagg.checking.explorer.worlds import WORLDS  # takes a second to import

    known = {world.name: world for world in WORLDS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"no world {unknown[0]!r}; there are {', '.join(known)}", param="--world")
    chosen = [known[name] for name in names] or [w for w in WORLDS if full or not w.only_full]
    shown = Console(stderr=True)  # says nothing where it is no terminal
    sound = []
    for number, world in enumerate(chosen, 1):
        with shown.status(f"{number} of {len(chosen)}: {world.name}, {world.num_states:,} states"):
            sound.append(_explore(world, report))
    return 0 if all(sound) else 1


def _explore(world: "World", report: Callable[[str], None]) -> bool:
    started = time.monotonic()
    seen = world.explore()
    if seen.problem:
        report(f"{world.name}: {seen}")
        return False
    verdict = "EXHAUSTED" if seen.exhausted else "NOT exhausted"
    took = time.monotonic() - started
    report(
        f"{world.name}: {seen.num_states:,} states, {seen.num_steps:,} steps, "
        f"{verdict}, {took:.1f} s"
    )
    return seen.exhausted
