"""Rules of tiers, taken away from a whole worker."""

from tests.unit.checking import tier_mutants
from tests.unit.checking.taken_away import without

TIER_RULES = (
    without(
        "what a tier copies out is held until it is copied",
        "tier",
        7,
        "one: a tier write ends: a tier has 'bytes of another request' as 'KV of 4'",
        mutants={"tiers.copies": tier_mutants.WritesHoldNothing},
    ),
    without(
        "what a tier copies in is held until it has ended, whoever wanted it",
        "tier-cancel",
        12,
        "one: a step of t ends: a step overwrites 'KV of 5'",
        mutants={"tiers.copies": tier_mutants.ReadsHoldNothing},
    ),
    without(
        "a block that does not come whole out of a tier is a miss",
        "tier",
        10,
        "one: a tier read ends: the cache offers 'bytes of another request' as 'KV of 4 5'",
        mutants={"tiers._loads": tier_mutants.BelievesTheTier},
    ),
    without(
        "a prefix counts when all of its blocks have come",
        "tier",
        12,
        "one: a tier read ends: a step computes from 'bytes of another request' as 'KV of 4 5'",
        mutants={"tiers._loads": tier_mutants.CountsWithTheFirst},
    ),
    without(
        "after a reset nothing of a tier is found until it is empty",
        "tier-reset",
        5,
        "one: a tier read ends: the cache offers 'old KV of 5' as 'KV of 5'",
        mutants={"tiers.index": tier_mutants.FoundUntilEmptied},
    ),
    without(
        "a tier is emptied when nothing is copied to it any more",
        "tier-reset-writes",
        10,
        "one: a tier read ends: the cache offers 'old KV of 5' as 'KV of 5'",
        mutants={"tiers.copies": tier_mutants.EmptiedWhileCopying},
    ),
    without(
        "a tier that could not be emptied is not used any more",
        "tier-reset",
        12,
        "one: a tier read ends: the cache offers 'old KV of 5' as 'KV of 5'",
        mutants={"tiers._clearing": tier_mutants.OpensWhatIsNotEmpty},
    ),
    without(
        "who has begun before a reset publishes nothing after it",
        "tier-reset",
        6,
        "one: a step of r ends: the cache offers 'old KV of 5 6' as 'KV of 5 6'",
        mutants={"kv": tier_mutants.PublishesAllTheSame},
    ),
    without(
        "who waits in the queue at a reset pulls nothing",
        "lending-reset",
        14,
        "prefill: hears CommitAnswer: the cache offers 'old KV of 4' as 'KV of 4'",
        mutants={"": tier_mutants.PullsAsPlanned},
    ),
    without(
        "what a tier brings for another worker is lent when it has come",
        "lending",
        2,
        "cache: hears AskLease: the cache offers 'nothing' as 'KV of 4'",
        mutants={"tiers._loads": tier_mutants.LendsBeforeItHolds},
    ),
    without(
        "what a tier copies in is held until it has ended, also for another worker",
        "lending-own",
        8,
        "cache: a tier read ends: the cache offers 'KV of 8' as 'KV of 5'",
        mutants={"tiers.copies": tier_mutants.ReadsHoldNothing},
    ),
    without(
        "a repeated request waits for the load that goes on",
        "lending-strangers",
        5,
        "cache: a tier read ends: KeyError: LeaseRequest",
        mutants={"tiers.lending": tier_mutants.LoadsOnceMore},
    ),
)
