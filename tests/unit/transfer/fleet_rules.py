"""Rules of prefix pulls and take-overs taken away from three whole workers."""

from disagg.messages.peer import WithdrawLease
from tests.unit.transfer import fleet_mutants, mutants, pair_mutants
from tests.unit.transfer.pair_mutants import any_epoch
from tests.unit.transfer.taken_away import cores_without

FLEET_RULES = (
    cores_without(
        "a prefix is matched and held in one call",
        "chain",
        {"prefix_lender": fleet_mutants.MatchesThenHolds},
        9,
        "prefill: hears CommitAnswer: the cache offers 'bytes of another request' as position 0",
        repeats=True,
    ),
    cores_without(
        "a pull's lease holds its blocks",
        "chain",
        {"leases": mutants.OfferWithoutHold},
        8,
        "prefill: hears CommitAnswer: the cache offers 'bytes of another request' as position 0",
    ),
    cores_without(
        "an unknown lease answers NO, also to a pull",
        "chain",
        {"leases": mutants.UnknownLeaseSaysOk},
        9,
        "prefill: hears CommitAnswer: the cache offers 'bytes of another request' as position 0",
        lease_time_outs=True,
    ),
    cores_without(
        "what is pulled is valid after the commit only",
        "chain",
        {"inbound": pair_mutants.ValidBeforeCommit},
        7,
        "prefill: READ 1 is DONE: the cache offers 'bytes of another request' as position 0",
        lease_time_outs=True,
    ),
    cores_without(
        "what is pulled is published after the commit only",
        "chain",
        {"prefix_pull": fleet_mutants.PublishedBeforeCommit},
        3,
        "prefill: hears Offers: the cache offers 'nothing' as position 0",
    ),
    cores_without(
        "what is pulled is leased on after the commit only",
        "chain",
        {"": fleet_mutants.LendsWhatItPulls, "prefill_side": fleet_mutants.ReservesWhilePulling},
        19,
        "decode: hears CommitAnswer: the cache offers 'nothing' as position 0",
        evictions=0,
    ),
    cores_without(
        "destinations are held until every READ is terminal, also of a pull given up",
        "chain-lost",
        {"inbound": mutants.DestinationsDroppedAtAbort},
        5,
        "prefill: READ 1 lands: 'KV 0': a READ lands in block 4, held by no transfer",
    ),
    cores_without(
        "a pull that is given up frees its blocks",
        "chain-lost",
        {"prefix_pull": fleet_mutants.FailsTheGeneration},
        2,
        "prefill: loses the cache: InvariantViolation: RequestKey is admitted after it began",
    ),
    cores_without(
        "a question that is given up is withdrawn",
        "chain",
        {"lease_requests": fleet_mutants.NeverWithdraws},
        4,
        "cache: hears AskLease: nothing leads to a good end any more",
        evictions=0,
        cancels=1,
    ),
    cores_without(
        "a lease is transferred in one step",
        "take-over",
        {"lease_answers": fleet_mutants.TransfersInTwoSteps},
        18,
        "second: hears CommitAnswer: the cache offers 'bytes of another request' as position 0",
        repeats=True,
    ),
    cores_without(
        "only a live lease is transferred",
        "take-over",
        {
            "leases": fleet_mutants.CommittedAreTransferred,
            "lease_answers": fleet_mutants.TransfersCommitted,
        },
        24,
        "second: hears CommitAnswer: the cache offers 'bytes of another request' as position 0",
    ),
    cores_without(
        "a lease that waits for another reader holds its blocks",
        "take-over",
        {"leases": fleet_mutants.OrphansAreDropped},
        17,
        "second: hears CommitAnswer: the cache offers 'bytes of another request' as position 0",
    ),
    cores_without(
        "the epoch of who answers AskLease is checked",
        "chain-strangers",
        {"lease_requests": fleet_mutants.BelievesAnyAnswer},
        3,
        "prefill: hears from a stranger Offers: a stranger's message did something",
    ),
    cores_without(
        "the epoch of who sends WithdrawLease is checked",
        "chain-strangers",
        {"": any_epoch(WithdrawLease)},
        5,
        "cache: hears from a stranger WithdrawLease: a stranger's message did something",
    ),
    cores_without(
        "the epoch of who answers TakeOver is checked",
        "take-over-strangers",
        {"lease_requests": fleet_mutants.BelievesAnyAnswer},
        10,
        "second: hears from a stranger Offers: a stranger's message did something",
    ),
)
