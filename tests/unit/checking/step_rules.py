"""Rules of two steps in flight, taken away from two whole workers."""

from tests.unit.checking import step_mutants
from tests.unit.checking.taken_away import without

STEP_RULES = (
    without(
        "of two steps in flight the one that has ended is published alone",
        "pair-steps",
        5,
        "prefill: a step of r ends: the cache offers 'nothing' as 'KV of 5 6'",
        mutants={"kv": step_mutants.PublishesWhatIsScheduled},
    ),
    without(
        "of two steps in flight each holds its blocks until it ends itself",
        "pair-steps",
        5,
        "prefill: a step fails: a step computes from 'bytes of another request' as 'KV of 5'",
        mutants={"kv._steps": step_mutants.StepsEndTogether},
    ),
    without(
        "a prefill that is handed over ends with the step that samples token 0",
        "pair-steps-growing",
        15,
        "decode: hears CommitAnswer: a step computes from 'half-written' as 'KV of 4 5 6, begun'",
        mutants={"batcher": step_mutants.SchedulesPastTheSeal},
    ),
    without(
        "nobody is preempted while a step is in flight",
        "mutual-steps",
        16,
        "right: a step of r ends: the cache offers 'nothing' as 'KV of 10 11 12'",
        mutants={"batcher": step_mutants.PreemptsWhileStepsRun},
    ),
)
