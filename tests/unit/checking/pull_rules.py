"""Rules of prefix pulls and take-overs taken away from three whole workers."""

from disagg.messages.peer import WithdrawLease
from tests.unit.checking import (
    handover_mutants,
    lease_mutants,
    pull_mutants,
    waiting_mutants,
)
from tests.unit.checking.handover_mutants import any_epoch
from tests.unit.checking.taken_away import without

PULL_RULES = (
    without(
        "a prefix is matched and held in one call",
        "chain",
        9,
        "prefill: hears CommitAnswer: the cache offers 'bytes of another request' as 'KV of 5'",
        delivery="repeated",
        mutants={"prefix_lender": pull_mutants.MatchesThenHolds},
    ),
    without(
        "a pull's lease holds its blocks",
        "chain",
        8,
        "prefill: hears CommitAnswer: the cache offers 'bytes of another request' as 'KV of 5'",
        mutants={"leases": lease_mutants.OfferWithoutHold},
    ),
    without(
        "a commit of an unknown lease is refused, also of a pull",
        "chain",
        9,
        "prefill: hears CommitAnswer: the cache offers 'bytes of another request' as 'KV of 5'",
        time_outs=("lease",),
        mutants={"leases": lease_mutants.UnknownLeaseIsConfirmed},
    ),
    without(
        "what is pulled is valid after the commit only",
        "chain",
        7,
        "prefill: READ 1 is DONE: the cache offers 'bytes of another request' as 'KV of 5'",
        time_outs=("lease",),
        mutants={"inbound": handover_mutants.ValidBeforeCommit},
    ),
    without(
        "what is pulled is published after the commit only",
        "chain",
        3,
        "prefill: hears Offers: the cache offers 'nothing' as 'KV of 5'",
        mutants={"prefix_pull": pull_mutants.PublishedBeforeCommit},
    ),
    without(
        "what is pulled is leased on after the commit only",
        "chain",
        19,
        "decode: hears CommitAnswer: the cache offers 'nothing' as 'KV of 5'",
        evictions=0,
        mutants={
            "": pull_mutants.LendsWhatItPulls,
            "prefill_side": pull_mutants.ReservesWhilePulling,
        },
    ),
    without(
        "destinations are held until every READ is terminal, also of a pull given up",
        "chain-lost",
        5,
        "prefill: READ 1 lands: 'KV of 5' in 4: a READ lands in block 4, held by no transfer",
        mutants={"inbound": lease_mutants.DestinationsDroppedAtAbort},
    ),
    without(
        "a pull that is given up frees its blocks",
        "chain-lost",
        2,
        "prefill: loses cache: InvariantViolation: RequestKey is admitted after it began",
        mutants={"prefix_pull": pull_mutants.FailsTheGeneration},
    ),
    without(
        "a request that is given up is withdrawn",
        "chain",
        4,
        "prefill: hears Cancel: nothing leads to a good end any more",
        evictions=0,
        cancels=1,
        mutants={"lease_requests": pull_mutants.NeverWithdraws},
    ),
    without(
        "the answer to a request whose lease is live is not forgotten",
        "chain-two",
        4,
        "prefill: hears Cancel: nothing leads to a good end any more",
        mutants={"lease_answers": pull_mutants.ForgetsLiveAnswers},
    ),
    without(
        "a take-over passes the admission that reservations pass",
        "take-over-limits",
        10,
        "second: hears Submit: InvariantViolation: 2 sequences, at most 1",
        mutants={"admission": waiting_mutants.TakesReservationsAnyway},
    ),
    without(
        "a lease is transferred in one step",
        "take-over",
        19,
        "second: hears CommitAnswer: the cache offers 'bytes of another request' as 'KV of 5'",
        delivery="repeated",
        mutants={"lease_answers": pull_mutants.TransfersInTwoSteps},
    ),
    without(
        "only a live lease is transferred",
        "take-over",
        25,
        "second: hears CommitAnswer: the cache offers 'bytes of another request' as 'KV of 5'",
        mutants={
            "leases": pull_mutants.CommittedAreTransferred,
            "lease_answers": pull_mutants.TransfersCommitted,
        },
    ),
    without(
        "a lease that waits for another reader holds its blocks",
        "take-over",
        18,
        "second: hears CommitAnswer: the cache offers 'bytes of another request' as 'KV of 5'",
        mutants={"leases": pull_mutants.OrphansAreDropped},
    ),
    without(
        "the epoch of who answers AskLease is checked",
        "chain-strangers",
        3,
        "prefill: hears from a stranger Offers: a stranger's message did something",
        mutants={"lease_requests": pull_mutants.BelievesAnyAnswer},
    ),
    without(
        "the epoch of who sends WithdrawLease is checked",
        "chain-strangers",
        5,
        "cache: hears from a stranger WithdrawLease: a stranger's message did something",
        mutants={"": any_epoch(WithdrawLease)},
    ),
    without(
        "the epoch of who answers TakeOver is checked",
        "take-over-strangers",
        11,
        "second: hears from a stranger Offers: a stranger's message did something",
        mutants={"lease_requests": pull_mutants.BelievesAnyAnswer},
    ),
)
