"""A rule taken away: in which world that shows, after how many steps, and how it ends."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from disagg.checking.explorer.exploration import Exploration
from disagg.checking.explorer.large_worlds import WORLDS
from disagg.checking.explorer.setting import Setting
from disagg.checking.explorer.world import World
from disagg.routing.core import RouterCore
from disagg.routing.request_lifecycle import RequestLifecycle
from disagg.scheduling.core import WorkerCore

NO_WAY = "from here no way leads to "


@dataclass(frozen=True, slots=True)
class TakenAway:
    """A row of the table in ``docs/lease.md``, and how it comes about.

    Attributes:
        rule: the rule, in a few words.
        mutant: what takes it away.
        world: where.
        setting: of that world without the rule.
        num_steps: of the shortest counter-example; until all is lost, where it is that no way leads
            to a goal any more.
        ends: how the counter-example ends, as `ending` says it.
        as_well: rules that are taken away together with it, as they would cover for it.
    """

    rule: str
    mutant: str
    world: str
    setting: Setting
    num_steps: int
    ends: str
    as_well: str = ""

    def explore(self) -> Exploration:
        """Visit that world."""
        return World(self.setting).explore()


def num_steps(seen: Exploration) -> int:
    """Of the counter-example, until the promise is broken."""
    return seen.num_to_lost if seen.problem.startswith(NO_WAY) else len(seen.trace)


def ending(seen: Exploration) -> str:
    """The last step of the counter-example, shortened, and what it breaks."""
    last = seen.trace[num_steps(seen) - 1] if num_steps(seen) else "at the start"
    problem = seen.problem
    if problem.startswith(NO_WAY):
        last = "at the start" if not seen.num_to_lost else last
        problem = "nothing leads to a good end any more"
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


def at(path: str, cls: type) -> Callable[[WorkerCore], None]:
    """Let an object of the core be one of the mutated class."""

    def mutate(core: WorkerCore) -> None:
        found: object = core
        for name in path.split(".") if path else ():
            found = getattr(found, name)
        found.__class__ = cls

    return mutate


def router(cls: type[RequestLifecycle]) -> Callable[[RouterCore], None]:
    """Let the router's requests be of the mutated class."""

    def mutate(core: RouterCore) -> None:
        core._lifecycle.__class__ = cls

    return mutate


def mutated(
    name: str,
    mutants: Mapping[str, type] | None = None,
    planner: type[RequestLifecycle] | None = None,
    **changes: Any,
) -> Setting:
    """The setting of a named world, changed, its workers and router with mutated classes.

    Args:
        name: of the world.
        mutants: by the path of the object of each worker that becomes one of them.
        planner: what the router's `RequestLifecycle` becomes.
        changes: of the setting.
    """

    def mutate(core: WorkerCore) -> None:
        for path, cls in (mutants or {}).items():
            at(path, cls)(core)

    if mutants:
        changes["mutate"] = mutate
    if planner is not None:
        changes["mutate_router"] = router(planner)
    return replace(WORLDS[name][-1], **changes)


def without(
    rule: str,
    name: str,
    num_steps: int,
    ends: str,
    as_well: str = "",
    *,
    mutants: Mapping[str, type] | None = None,
    planner: type[RequestLifecycle] | None = None,
    **changes: Any,
) -> TakenAway:
    """A row; the first arguments as in `TakenAway`, the others as in `mutated`."""
    setting = mutated(name, mutants, planner, **changes)
    classes = [*([planner] if planner else []), *(mutants or {}).values()]
    names = " + ".join(f"`{cls.__name__}`" for cls in classes)
    said = ", ".join(f"{key}={value}" for key, value in changes.items())
    world = f"`{name}`" + (f", {said}" if said and names else "")
    return TakenAway(rule, names or f"`{said}`", world, setting, num_steps, ends, as_well)
