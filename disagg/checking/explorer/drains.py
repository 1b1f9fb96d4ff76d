"""A worker is asked to end: it takes no more work, moves what decodes, and ends in order."""

from collections.abc import Iterator

from disagg.checking.explorer.exploration import Step
from disagg.checking.explorer.moves import Moves
from disagg.checking.explorer.state import DRAIN_MS, GIVE_UP_MS, State, put
from disagg.messages.session import Drain
from disagg.messages.stats import WorkerStats

_DRAINS = WorkerStats(0, 0, 0, 8, 8, 0, 0, 0, 0, ready=False, draining=True)
"""What its next report says; all else of it counts for the choice of workers only."""


def drain_steps(moves: Moves, now: State) -> Iterator[Step[State]]:
    """It is asked, at any moment before all clients have their ends, and what follows from that."""
    for side in moves.setting.drains:
        if now.workers[side] < 0:
            continue
        if side not in now.faults.drains:
            if not moves.is_over(now):
                yield _asked(moves, now, side)
            continue
        if moves.facts(now, side).keys:
            yield moves.does(now, side, "moves or ends what goes on", "tick", GIVE_UP_MS)
        yield moves.does(now, side, "its time to drain is over", "tick", DRAIN_MS)


def _asked(moves: Moves, now: State, side: int) -> Step[State]:
    faults = now.faults._replace(drains=tuple(sorted((*now.faults.drains, side))))
    if side not in now.cut:
        up = (*now.up[side], moves.number(_DRAINS))
        now = now._replace(up=put(now.up, side, up))
    label, order = "is asked to end", Drain(DRAIN_MS, ends=True)
    return moves.does(now._replace(faults=faults), side, label, "on_router_message", 0, order)
