"""States of a lease, at the owner."""

from enum import StrEnum

from disagg.transfer.transitions import TransitionTable


class LeaseState(StrEnum):
    """Where a lease is in its life; a forgotten lease counts as DEAD."""

    OPEN = "OPEN"
    SEALED = "SEALED"
    ORPHANED = "ORPHANED"
    COMMITTED = "COMMITTED"
    DEAD = "DEAD"


class LeaseEvent(StrEnum):
    """What can happen to a lease."""

    RESERVED = "reservation granted"
    OPENED = "AskLease"
    OFFER = "offer"
    SEAL = "seal"
    COMPUTED = "chunk, nothing to offer"
    READ_ON = "ReadProgress, more than before"
    SUMMED = "checksums known"
    ASK = "AskOffers"
    COMMIT_EQUAL = "Commit, counts equal"
    COMMIT_SAME = "Commit, same attempt"
    COMMIT_OTHER = "Commit, any other"
    SEEN = "CommitSeen"
    END = "end"
    WITHDRAW = "WithdrawLease"
    TRANSFER = "TakeOver"
    EXPIRE = "time to live"
    READER_LOST = "reader lost"
    ORPHAN = "reader of a hand-over lost"
    CROWDED_OUT = "committed_max newer"
    FORGET = "forget"


_S, _E = LeaseState, LeaseEvent
_DIE = "be DEAD first; forget and drop the hold after"
_PASSES = "be DEAD; a new lease holds the blocks before this one drops them"

LEASE_TABLE: TransitionTable[LeaseState, LeaseEvent] = TransitionTable(
    "lease",
    [
        (_S.OPEN, _E.OFFER, _S.OPEN, "hold the blocks, number and send their ranges"),
        (_S.OPEN, _E.COMPUTED, _S.OPEN, "live anew; send how far the prefill is"),
        (_S.OPEN, _E.READ_ON, _S.OPEN, "live anew"),
        (_S.OPEN, _E.SUMMED, _S.OPEN, "live anew; send the ranges that waited for them"),
        (
            _S.OPEN,
            _E.SEAL,
            _S.SEALED,
            "hold the last blocks, send them with the counts",
        ),
        (_S.OPEN, _E.ASK, _S.OPEN, "send the offers from that number on"),
        (_S.OPEN, _E.COMMIT_OTHER, _S.OPEN, "send a refusal"),
        (_S.OPEN, _E.END, _S.DEAD, f"{_DIE}; send dead"),
        (_S.OPEN, _E.EXPIRE, _S.DEAD, f"{_DIE}; send dead"),
        (_S.OPEN, _E.READER_LOST, _S.DEAD, _DIE),
        (
            _S.SEALED,
            _E.ASK,
            _S.SEALED,
            "send the offers from that number on, and the seal",
        ),
        (_S.SEALED, _E.READ_ON, _S.SEALED, "live anew"),
        (
            _S.SEALED,
            _E.SUMMED,
            _S.SEALED,
            "live anew; send the ranges that waited for them, with the last the counts",
        ),
        (_S.SEALED, _E.COMMIT_EQUAL, _S.COMMITTED, "drop the hold, send the confirmation"),
        (_S.SEALED, _E.COMMIT_OTHER, _S.SEALED, "send a refusal"),
        (_S.SEALED, _E.END, _S.DEAD, f"{_DIE}; send dead"),
        (_S.SEALED, _E.EXPIRE, _S.DEAD, f"{_DIE}; send dead"),
        (_S.SEALED, _E.WITHDRAW, _S.DEAD, _DIE),
        (_S.SEALED, _E.READER_LOST, _S.DEAD, _DIE),
        (_S.SEALED, _E.ORPHAN, _S.ORPHANED, "hold on for take_over_ms; only TakeOver may use it"),
        (_S.SEALED, _E.TRANSFER, _S.DEAD, _PASSES),
        (_S.ORPHANED, _E.TRANSFER, _S.DEAD, _PASSES),
        (_S.ORPHANED, _E.SUMMED, _S.ORPHANED, "nothing: who takes it over has its own computed"),
        (_S.ORPHANED, _E.ASK, _S.ORPHANED, "send dead"),
        (_S.ORPHANED, _E.COMMIT_OTHER, _S.ORPHANED, "send a refusal"),
        (_S.ORPHANED, _E.END, _S.DEAD, _DIE),
        (_S.ORPHANED, _E.EXPIRE, _S.DEAD, _DIE),
        (_S.COMMITTED, _E.COMMIT_SAME, _S.COMMITTED, "send the confirmation again"),
        (_S.COMMITTED, _E.COMMIT_OTHER, _S.COMMITTED, "send a refusal"),
        (_S.COMMITTED, _E.ASK, _S.COMMITTED, "nothing: the reader has all it needs"),
        (_S.COMMITTED, _E.SEEN, None, "forget"),
        (_S.COMMITTED, _E.READER_LOST, None, "forget"),
        (
            _S.COMMITTED,
            _E.CROWDED_OUT,
            None,
            "forget; a late Commit is refused, which is safe",
        ),
        (
            _S.DEAD,
            _E.FORGET,
            None,
            "drop the hold; from now on Commit is refused, AskOffers is answered dead",
        ),
    ],
    births=[
        (_E.RESERVED, _S.OPEN, "hold nothing yet"),
        (_E.OPENED, _S.SEALED, "match and hold in one step, send all with the counts"),
        (_E.TRANSFER, _S.SEALED, "hold the old lease's blocks, send them with the counts"),
    ],
)
