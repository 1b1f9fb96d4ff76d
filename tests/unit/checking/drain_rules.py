"""Rules of a worker that drains, taken away."""

from tests.unit.checking import drain_mutants as mutants
from tests.unit.checking.taken_away import without

DRAIN_RULES = (
    without(
        "what moves has no step in flight",
        "drain",
        20,
        "second: hears CommitAnswer: a step computes from 'half-written' as 'KV of 5 6 12, begun'",
        mutants={"_moving": mutants.MovesAmidSteps},
        read_errors=0,
    ),
    without(
        "what could not move yet is moved later",
        "drain",
        5,
        "decode: moves or ends what goes on: nothing leads to a good end any more",
        mutants={"_draining": mutants.MovesOnce},
        read_errors=0,
    ),
)
