"""A rule taken away: in which world that shows, after how many steps, and how it ends."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from disagg.checking.explorer.exploration import Exploration
from disagg.checking.explorer.fleet_world import FleetWorld
from disagg.checking.explorer.lease_world import LeaseWorld
from disagg.checking.explorer.mutual_world import MutualWorld
from disagg.checking.explorer.pair_world import PairWorld
from disagg.checking.explorer.worlds import (
    FLEET_SETTINGS,
    LEASE_SETTINGS,
    MUTUAL_SETTINGS,
    PAIR_SETTINGS,
)
from disagg.scheduling.core import WorkerCore

NO_WAY = "from here no way leads to a goal"


@dataclass(frozen=True, slots=True)
class TakenAway:
    """A row of the table in ``docs/lease.md``, and how it comes about.

    Attributes:
        rule: the rule, in a few words.
        mutant: what takes it away.
        world: where.
        explore: visits that world without the rule.
        num_steps: of the shortest counter-example; until all is lost, where it is that no way leads
            to a goal any more.
        ends: how the counter-example ends, as `ending` says it.
        as_well: rules that are taken away together with it, as they would cover for it.
    """

    rule: str
    mutant: str
    world: str
    explore: Callable[[], Exploration]
    num_steps: int
    ends: str
    as_well: str = ""


def num_steps(seen: Exploration) -> int:
    """Of the counter-example, until the promise is broken."""
    return seen.num_to_lost or len(seen.trace)


def ending(seen: Exploration) -> str:
    """The last step of the counter-example, shortened, and what it breaks."""
    last = seen.trace[num_steps(seen) - 1] if seen.trace else "at the start"
    problem = "nothing leads to a good end any more" if seen.problem == NO_WAY else seen.problem
    last, problem = (re.sub(r"(\w+)\(.*\)", r"\1", text) for text in (last, problem))
    return f"{last}: {problem.partition(': [')[0]}"


def document(rows: Iterable[TakenAway]) -> str:
    """The table in ``docs/lease.md``."""
    lines = ["| rule taken away | by | world | steps | how it ends |", "|---|---|---|---|---|"]
    for row in rows:
        rule = f"{row.rule} (with it: {row.as_well})" if row.as_well else row.rule
        cells = (rule, row.mutant, row.world, str(row.num_steps), row.ends)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


# -- rows of each kind of world ---------------------------------------------------------------


def at(path: str, cls: type) -> Callable[[WorkerCore], None]:
    """Let an object of the core be one of the mutated class."""

    def mutate(core: WorkerCore) -> None:
        found: object = core
        for name in path.split(".") if path else ():
            found = getattr(found, name)
        found.__class__ = cls

    return mutate


def lease_without(
    rule: str, name: str, num_steps: int, ends: str, as_well: str = "", **changes: Any
) -> TakenAway:
    """A row of a `LeaseWorld`; ``leases`` and ``inbound`` are the mutated tables."""
    setting = replace(LEASE_SETTINGS[name], **changes)
    mutants = [changes.pop(key).__name__ for key in ("leases", "inbound") if key in changes]
    world, mutant = _shown(name, mutants, changes)
    return TakenAway(rule, mutant, world, LeaseWorld(setting).explore, num_steps, ends, as_well)


def cores_without(
    rule: str,
    name: str,
    mutants: dict[str, type],
    num_steps: int,
    ends: str,
    as_well: str = "",
    **changes: Any,
) -> TakenAway:
    """A row of a world of whole workers.

    Args:
        rule: as in `TakenAway`.
        name: of the world.
        mutants: by the path of the object that becomes one of them.
        num_steps: as in `TakenAway`.
        ends: as in `TakenAway`.
        as_well: as in `TakenAway`.
        changes: of the world's setting.
    """

    def mutate(core: WorkerCore) -> None:
        for path, cls in mutants.items():
            at(path, cls)(core)

    def explore() -> Exploration:
        if name in PAIR_SETTINGS:
            return PairWorld(replace(PAIR_SETTINGS[name], mutate=mutate, **changes)).explore()
        if name in FLEET_SETTINGS:
            return FleetWorld(replace(FLEET_SETTINGS[name], mutate=mutate, **changes)).explore()
        return MutualWorld(replace(MUTUAL_SETTINGS[name], mutate=mutate, **changes)).explore()

    world, mutant = _shown(name, [cls.__name__ for cls in mutants.values()], changes)
    return TakenAway(rule, mutant, world, explore, num_steps, ends, as_well)


def _shown(name: str, mutants: list[str], changes: dict[str, Any]) -> tuple[str, str]:
    """World and mutant; without a mutated class, a rule of the world itself is taken away."""
    said = ", ".join(f"{key}={value}" for key, value in changes.items())
    if not mutants:
        return f"`{name}`", f"`{said}`"
    return f"`{name}`" + (f", {said}" if said else ""), " + ".join(f"`{one}`" for one in mutants)
