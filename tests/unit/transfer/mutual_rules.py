"""Rules against waiting in a circle, livelock and starvation taken away."""

from disagg.checking.explorer.lockstep_world import LockstepWorld
from disagg.checking.explorer.worlds import MUTUAL_SETTINGS
from tests.unit.transfer import mutual_mutants as mutants
from tests.unit.transfer.taken_away import TakenAway, cores_without

MUTUAL_RULES = (
    cores_without(
        "Reserve is answered at once, never queued",
        "mutual",
        {"": mutants.QueuesReserves},
        4,
        "right: submit of s arrives: nothing leads to a good end any more",
    ),
    cores_without(
        "a prefill has its own blocks for the whole prompt before it asks",
        "mutual",
        {"kv": mutants.PromisesOneToken, "batcher": mutants.PrefillsWaitForBlocks},
        4,
        "right: submit of s arrives: nothing leads to a good end any more",
        "the share, which alone keeps two apart",
        share=2.0,
    ),
    cores_without(
        "who is refused gives back what it holds",
        "mutual",
        {"prefill_side": mutants.HoldsWhileItWaits, "batcher": mutants.AsksAgain},
        2,
        "right: submit of s arrives: nothing leads to a good end any more",
    ),
    cores_without(
        "a preempted prefill gives back its lease and reservation",
        "mutual-queue",
        {"prefill_side": mutants.GoesOnUnderTheOldLease},
        6,
        "right: a step of s ends and a prefill is preempted: nothing leads to a good end any more",
    ),
    TakenAway(
        "who is refused waits for a random time",
        "`delays=(1,)`",
        "`lockstep`",
        LockstepWorld(MUTUAL_SETTINGS["mutual"], delays=(1,)).explore,
        0,
        "at the start: nothing leads to a good end any more",
    ),
    cores_without(
        "nothing is reserved while an older request waits for memory",
        "mutual-older",
        {"admission": mutants.TakesReservationsAnyway},
        20,
        "right: a step of t ends: overtaken by one who came later",
    ),
)
