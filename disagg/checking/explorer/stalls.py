"""A worker's step does not end for so long that its reports say so; what is there goes on."""

from collections.abc import Iterator

from disagg.checking.explorer.exploration import Step
from disagg.checking.explorer.moves import Moves
from disagg.checking.explorer.state import State, put
from disagg.messages.stats import WorkerStats

_STALLED = WorkerStats(0, 0, 0, 8, 8, 0, 0, 0, 0, ready=True, stalled=True)
_GOES_ON = WorkerStats(0, 0, 0, 8, 8, 0, 0, 0, 0, ready=True)


def stall_steps(moves: Moves, now: State) -> Iterator[Step[State]]:
    """While a step runs a report may say that it has stalled, and once it has ended that not."""
    for side, worker in enumerate(now.workers):
        if worker < 0 or side in now.cut or moves.is_over(now):
            continue
        runs, stalled = moves.facts(now, side).running is not None, now.faults.stalled
        if runs and now.faults.stalls < moves.setting.stalls:
            faults = now.faults._replace(
                stalls=now.faults.stalls + 1, stalled=tuple(sorted({*stalled, side}))
            )
            yield _says(moves, now._replace(faults=faults), side, _STALLED)
        elif not runs and side in stalled:
            others = tuple(one for one in stalled if one != side)
            after = now._replace(faults=now.faults._replace(stalled=others))
            yield _says(moves, after, side, _GOES_ON)


def _says(moves: Moves, now: State, side: int, report: WorkerStats) -> Step[State]:
    what = "its step does not end" if report.stalled else "it goes on"
    up = put(now.up, side, (*now.up[side], moves.number(report)))
    return Step(f"{moves.names[side]}: says that {what}", now._replace(up=up))
