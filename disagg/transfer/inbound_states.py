"""States of an inbound transfer, at the reader."""

from enum import StrEnum

from disagg.transfer.transitions import TransitionTable


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
