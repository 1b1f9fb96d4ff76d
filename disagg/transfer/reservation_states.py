"""States of a reservation: at the decode worker that grants it, and at the one that asks."""

from enum import StrEnum

from disagg.transfer.transitions import TransitionTable


class ReservationState(StrEnum):
    """What the decode worker last said for one submitted generation."""

    SUBMITTED = "SUBMITTED"
    DECIDING = "DECIDING"
    GRANTED = "GRANTED"
    REFUSED = "REFUSED"


class ReservationEvent(StrEnum):
    """What can happen to a submitted generation's reservation."""

    RESERVE_NEWER = "Reserve(higher n)"
    RESERVE_SAME = "Reserve(same n)"
    YES = "decided yes"
    NO = "decided no"
    RELEASE = "Release(n or higher)"
    EXPIRE = "time to live"
    ENDED = "ended or committed"


_S, _E = ReservationState, ReservationEvent

RESERVATION_TABLE: TransitionTable[ReservationState, ReservationEvent] = TransitionTable(
    "reservation",
    [
        (_S.SUBMITTED, _E.RESERVE_NEWER, _S.DECIDING, "ask the caller"),
        (_S.SUBMITTED, _E.RELEASE, _S.REFUSED, "refuse what comes later up to n"),
        (_S.SUBMITTED, _E.ENDED, None, "forget"),
        (_S.DECIDING, _E.YES, _S.GRANTED, "answer yes with what is lacked"),
        (_S.DECIDING, _E.NO, _S.REFUSED, "answer no"),
        (_S.DECIDING, _E.ENDED, None, "forget"),
        (_S.GRANTED, _E.RESERVE_SAME, _S.GRANTED, "give the old answer again"),
        (
            _S.GRANTED,
            _E.RESERVE_NEWER,
            _S.DECIDING,
            "ask the caller, who frees the old one first",
        ),
        (_S.GRANTED, _E.RELEASE, _S.REFUSED, "the caller frees it"),
        (_S.GRANTED, _E.EXPIRE, _S.REFUSED, "the caller frees it"),
        (_S.GRANTED, _E.ENDED, None, "forget; the caller frees it, or keeps it if committed"),
        (_S.REFUSED, _E.RESERVE_SAME, _S.REFUSED, "give the old answer again"),
        (_S.REFUSED, _E.RESERVE_NEWER, _S.DECIDING, "ask the caller"),
        (_S.REFUSED, _E.RELEASE, _S.REFUSED, "refuse what comes later up to n"),
        (_S.REFUSED, _E.ENDED, None, "forget"),
    ],
)


class AskState(StrEnum):
    """Where the prefill worker is in asking for memory."""

    WAITING = "WAITING"
    GRANTED = "GRANTED"


class AskEvent(StrEnum):
    """What can happen to a question."""

    YES = "Reserved(yes, this n)"
    NO = "Reserved(no, this n)"
    TIME_OUT = "time-out"
    GIVE_BACK = "give_back"
    PEER_LOST = "peer lost"
    HANDED_OVER = "handed over"


ASK_TABLE: TransitionTable[AskState, AskEvent] = TransitionTable(
    "ask",
    [
        (
            AskState.WAITING,
            AskEvent.YES,
            AskState.GRANTED,
            "tell the caller what is lacked",
        ),
        (AskState.WAITING, AskEvent.NO, None, "tell the caller"),
        (AskState.WAITING, AskEvent.TIME_OUT, None, "counts as no; send Release(n)"),
        (AskState.WAITING, AskEvent.GIVE_BACK, None, "send Release(n)"),
        (AskState.WAITING, AskEvent.PEER_LOST, None, "counts as no"),
        (AskState.GRANTED, AskEvent.GIVE_BACK, None, "send Release(n)"),
        (
            AskState.GRANTED,
            AskEvent.PEER_LOST,
            None,
            "forget: the lease ends by itself",
        ),
        (
            AskState.GRANTED,
            AskEvent.HANDED_OVER,
            None,
            "forget: the lease is sealed, its end is the reservation's",
        ),
    ],
)
