"""States at the reader: of a request for a lease, and of an inbound transfer."""

from enum import StrEnum

from disagg.transfer.transitions import TransitionTable


class LeaseRequestState(StrEnum):
    """Where a request for a lease is: an `AskLease` or a `TakeOver`."""

    ASKED = "ASKED"
    ANSWERED = "ANSWERED"


class LeaseRequestEvent(StrEnum):
    """What can happen to a request for a lease."""

    REPEAT = "interval"
    LEASE = "Offers(this n)"
    NONE = "dead Offers(this n)"
    TIME_OUT = "time-out"
    GIVE_UP = "give_up"
    PEER_LOST = "peer lost"
    FINISH = "committed"


_Q, _V = LeaseRequestState, LeaseRequestEvent

LEASE_REQUEST_TABLE: TransitionTable[LeaseRequestState, LeaseRequestEvent] = TransitionTable(
    "request for a lease",
    [
        (
            _Q.ASKED,
            _V.REPEAT,
            _Q.ASKED,
            "send the same request again",
        ),
        (
            _Q.ASKED,
            _V.LEASE,
            _Q.ANSWERED,
            "begin the inbound transfer up to the answer's boundary",
        ),
        (_Q.ASKED, _V.NONE, None, "tell the caller"),
        (
            _Q.ASKED,
            _V.TIME_OUT,
            None,
            "tell the caller; send WithdrawLease(n)",
        ),
        (_Q.ASKED, _V.GIVE_UP, None, "send WithdrawLease(n)"),
        (_Q.ASKED, _V.PEER_LOST, None, "tell the caller"),
        (
            _Q.ANSWERED,
            _V.LEASE,
            _Q.ANSWERED,
            "a repetition: pass it on to the inbound transfer",
        ),
        (
            _Q.ANSWERED,
            _V.NONE,
            _Q.ANSWERED,
            "pass it on to the inbound transfer, which fails",
        ),
        (
            _Q.ANSWERED,
            _V.TIME_OUT,
            None,
            "tell the caller; send WithdrawLease(n)",
        ),
        (_Q.ANSWERED, _V.GIVE_UP, None, "send WithdrawLease(n)"),
        (
            _Q.ANSWERED,
            _V.PEER_LOST,
            None,
            "forget: the inbound transfer fails",
        ),
        (
            _Q.ANSWERED,
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
    COMPLETE = "every READ done, counts met, all covered"
    REPEAT = "interval"
    OK = "OK(current attempt)"
    OK_PARTLY = "OK(current attempt), a READ had an error"
    FAIL = "abort, dead, NO, lost, error, stuck"
    READS_LEFT = "a READ in progress"
    READS_TERMINAL = "no READ in progress"
    FINISH = "finish"


_S, _E = InboundState, InboundEvent

INBOUND_TABLE: TransitionTable[InboundState, InboundEvent] = TransitionTable(
    "inbound",
    [
        (_S.RESERVED, _E.LEASE_KNOWN, _S.READING, "remember the lease's id"),
        (_S.RESERVED, _E.REPEAT, _S.RESERVED, "AskOffers"),
        (_S.RESERVED, _E.FAIL, _S.FAILED, "tell the caller"),
        (
            _S.READING,
            _E.OFFERS,
            _S.READING,
            "post READs for what is new; at a gap AskOffers",
        ),
        (_S.READING, _E.READ_DONE, _S.READING, "count it, with its error"),
        (_S.READING, _E.REPEAT, _S.READING, "AskOffers, unless the list is complete"),
        (_S.READING, _E.COMPLETE, _S.COMMITTING, "take a new attempt, send Commit"),
        (_S.READING, _E.FAIL, _S.FAILED, "tell the caller"),
        (_S.COMMITTING, _E.REPEAT, _S.COMMITTING, "send the same Commit again"),
        (_S.COMMITTING, _E.OK, _S.VALID, "tell the caller, send CommitSeen"),
        (
            _S.COMMITTING,
            _E.OK_PARTLY,
            _S.PARTIAL,
            "tell the caller which blocks did not arrive, send CommitSeen",
        ),
        (_S.COMMITTING, _E.FAIL, _S.FAILED, "tell the caller"),
        (
            _S.VALID,
            _E.FINISH,
            None,
            "drop the hold: the caller's request holds the blocks",
        ),
        (_S.PARTIAL, _E.FINISH, None, "drop the hold: the cache has what arrived"),
        (_S.FAILED, _E.READS_LEFT, _S.DRAINING, "keep holding all destinations"),
        (_S.FAILED, _E.READS_TERMINAL, None, "drop the hold, tell the caller"),
        (_S.DRAINING, _E.READ_DONE, _S.DRAINING, "count it, whatever it says"),
        (_S.DRAINING, _E.READS_TERMINAL, None, "drop the hold, tell the caller"),
    ],
)
