"""A router is gone for ever; the workers notice, each at any time, and the others go on."""

from collections.abc import Iterator

from disagg.checking.explorer.exploration import Step
from disagg.checking.explorer.moves import Moves
from disagg.checking.explorer.state import State
from disagg.messages.identity import RequestKey


def router_steps(moves: Moves, now: State) -> Iterator[Step[State]]:
    """What a router's end leads to."""
    gone = dict(now.faults.routers)
    for router in moves.setting.routers_vanish:
        if router not in gone:
            yield _vanishes(moves, now, router)
            continue
        for side, worker in enumerate(now.workers):
            if worker >= 0 and side not in gone[router]:
                noticed = gone | {router: tuple(sorted((*gone[router], side)))}
                faults = now.faults._replace(routers=tuple(sorted(noticed.items())))
                yield _notices(moves, now._replace(faults=faults), side, router)


def _vanishes(moves: Moves, now: State, router: str) -> Step[State]:
    """What it has said and no worker has heard yet is lost."""
    down = tuple(
        tuple(one for one in queue if moves.messages[one].key.router != router)  # type: ignore[attr-defined]
        for queue in now.down
    )
    faults = now.faults._replace(routers=tuple(sorted((*now.faults.routers, (router, ())))))
    after = now._replace(down=down, faults=faults)
    return moves.routes(after, f"router {router} vanishes", "vanish", router)


def _notices(moves: Moves, now: State, side: int, router: str) -> Step[State]:
    """The promise: all of its requests end at this worker, with their leases, and no other one."""
    before = _parts(moves, now, side)
    step = moves.does(now, side, f"loses router {router}", "on_router_lost", 0, router)
    after = _parts(moves, step.state, side)
    broken = ""
    if after != {key for key in before if key.router != router}:
        broken = f"of {sorted(before)} there are {sorted(after)} when router {router} is lost"
    return Step(step.label, step.state, step.broken or broken)


def _parts(moves: Moves, now: State, side: int) -> set[RequestKey]:
    """Generations that have a part at a worker, or a hand-over's live lease."""
    core = moves.workers.thaw(now.workers[side])
    return {*core.sequences, *core.leases.handed_over}
