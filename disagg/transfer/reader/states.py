"""States at the reader: of a request for a lease, and of an inbound transfer."""

from enum import StrEnum

from disagg.transfer.transitions import TransitionTable


class LeaseRequestState(StrEnum):
    """Where a request for a lease is: an `AskLease` or a `TakeOver`."""

    WAITING = "WAITING"
    GRANTED = "GRANTED"


class LeaseRequestEvent(StrEnum):
    """What can happen to a request for a lease."""

    REPEAT = "interval"
    LOADING = "LeaseLoading(this n), more than before"
    LEASE = "Offers(this n)"
    NONE = "dead Offers(this n)"
    TIME_OUT = "time-out"
    GIVE_UP = "give_up"
    PEER_LOST = "peer lost"
    FINISH = "committed"


_R, _V = LeaseRequestState, LeaseRequestEvent

LEASE_REQUEST_TABLE: TransitionTable[LeaseRequestState, LeaseRequestEvent] = TransitionTable(
    "request for a lease",
    [
        (
            _R.WAITING,
            _V.REPEAT,
            _R.WAITING,
            "send the same request again",
        ),
        (
            _R.WAITING,
            _V.LOADING,
            _R.WAITING,
            "wait as long again",
        ),
        (
            _R.WAITING,
            _V.LEASE,
            _R.GRANTED,
            "begin the inbound transfer up to the answer's boundary",
        ),
        (_R.WAITING, _V.NONE, None, "inform the requester"),
        (
            _R.WAITING,
            _V.TIME_OUT,
            None,
            "send WithdrawLease(n), inform the requester",
        ),
        (_R.WAITING, _V.GIVE_UP, None, "send WithdrawLease(n)"),
        (_R.WAITING, _V.PEER_LOST, None, "inform the requester"),
        (
            _R.GRANTED,
            _V.LEASE,
            _R.GRANTED,
            "a repetition: pass it on to the inbound transfer",
        ),
        (
            _R.GRANTED,
            _V.NONE,
            _R.GRANTED,
            "pass it on to the inbound transfer, which fails",
        ),
        (
            _R.GRANTED,
            _V.TIME_OUT,
            None,
            "send WithdrawLease(n), inform the requester",
        ),
        (_R.GRANTED, _V.GIVE_UP, None, "send WithdrawLease(n)"),
        (
            _R.GRANTED,
            _V.PEER_LOST,
            None,
            "forget: the inbound transfer fails",
        ),
        (
            _R.GRANTED,
            _V.FINISH,
            None,
            "forget: the lease is committed",
        ),
    ],
)


class InboundState(StrEnum):
    """Where an inbound transfer is in its life."""

    RESERVED = "RESERVED"
    READING = "READING"
    COMMITTING = "COMMITTING"
    VALID = "VALID"
    PARTIAL = "PARTIAL"
    FAILED = "FAILED"
    DRAINING = "DRAINING"


class InboundEvent(StrEnum):
    """What can happen to an inbound transfer."""

    LEASE_KNOWN = "first Offers"
    OFFERS = "Offers"
    READ_DONE = "a READ done"
    SUMMED = "checksums of a READ known"
    COMPLETE = "every READ done and checked, counts met, all covered"
    REPEAT = "interval"
    OK = "CommitAnswer(ok, this attempt)"
    OK_PARTLY = "CommitAnswer(ok, this attempt), a READ had an error"
    FAIL = "abort, dead, refused, lost, error, stuck"
    READS_LEFT = "a READ in progress"
    READS_TERMINAL = "no READ in progress"
    FINISH = "finish"


_S, _E = InboundState, InboundEvent

INBOUND_TABLE: TransitionTable[InboundState, InboundEvent] = TransitionTable(
    "inbound",
    [
        (_S.RESERVED, _E.LEASE_KNOWN, _S.READING, "remember the lease's id"),
        (_S.RESERVED, _E.REPEAT, _S.RESERVED, "AskOffers"),
        (_S.RESERVED, _E.FAIL, _S.FAILED, "inform the listener"),
        (
            _S.READING,
            _E.OFFERS,
            _S.READING,
            "post READs for what is new; at a gap AskOffers",
        ),
        (
            _S.READING,
            _E.READ_DONE,
            _S.READING,
            "count it, with its error; with checksums only when they are known",
        ),
        (_S.READING, _E.SUMMED, _S.READING, "count it; blocks that differ have not arrived"),
        (_S.READING, _E.REPEAT, _S.READING, "AskOffers, unless the list is complete"),
        (_S.READING, _E.COMPLETE, _S.COMMITTING, "take a new attempt, send Commit"),
        (_S.READING, _E.FAIL, _S.FAILED, "inform the listener"),
        (_S.COMMITTING, _E.REPEAT, _S.COMMITTING, "send the same Commit again"),
        (_S.COMMITTING, _E.OK, _S.VALID, "inform the listener, send CommitSeen"),
        (
            _S.COMMITTING,
            _E.OK_PARTLY,
            _S.PARTIAL,
            "inform the listener of the blocks that did not arrive, send CommitSeen",
        ),
        (_S.COMMITTING, _E.FAIL, _S.FAILED, "inform the listener"),
        (
            _S.VALID,
            _E.FINISH,
            None,
            "drop the hold: the caller's request holds the blocks",
        ),
        (_S.PARTIAL, _E.FINISH, None, "drop the hold: the cache has what arrived"),
        (_S.FAILED, _E.READS_LEFT, _S.DRAINING, "keep holding all destinations"),
        (_S.FAILED, _E.READS_TERMINAL, None, "drop the hold, inform the listener"),
        (_S.DRAINING, _E.READ_DONE, _S.DRAINING, "count it, done or failed"),
        (_S.DRAINING, _E.READS_TERMINAL, None, "drop the hold, inform the listener"),
    ],
)
