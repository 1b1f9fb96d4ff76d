"""Rules against waiting in a circle, livelock and starvation taken away."""

from tests.unit.checking import waiting_mutants
from tests.unit.checking.taken_away import without

WAITING_RULES = (
    without(
        "Reserve is answered at once, never queued",
        "mutual",
        4,
        "right: hears Submit: nothing leads to a good end any more",
        mutants={"": waiting_mutants.QueuesReserves},
    ),
    without(
        "a prefill has its own blocks for the whole prompt before it asks",
        "mutual",
        4,
        "right: hears Submit: nothing leads to a good end any more",
        "the share, which alone keeps two apart",
        share=2.0,
        mutants={
            "kv": waiting_mutants.PromisesOneToken,
            "batcher": waiting_mutants.PrefillsWaitForBlocks,
        },
    ),
    without(
        "who is refused gives back what it holds",
        "mutual",
        2,
        "right: hears Submit: nothing leads to a good end any more",
        mutants={
            "prefill_side": waiting_mutants.HoldsWhileItWaits,
            "batcher": waiting_mutants.AsksAgain,
        },
    ),
    without(
        "a preempted prefill gives back its lease and reservation",
        "mutual-queue",
        6,
        "right: a step ends and a prefill is preempted: nothing leads to a good end any more",
        mutants={"prefill_side": waiting_mutants.GoesOnUnderTheOldLease},
    ),
    without(
        "who is refused waits for a random time",
        "lockstep",
        0,
        "at the start: nothing leads to a good end any more",
        delays=(1,),
    ),
    without(
        "nothing is reserved while an older request waits for memory",
        "mutual-older",
        20,
        "right: a step of t ends: overtaken by one who came later",
        mutants={"admission": waiting_mutants.TakesReservationsAnyway},
    ),
)
