"""States of a reservation, at the decode worker that grants it and the requesting worker."""

from enum import StrEnum

from disagg.transfer.transitions import TransitionTable


class ReservationState(StrEnum):
    """What the decode worker last answered for one submitted generation."""

    SUBMITTED = "SUBMITTED"
    DECIDING = "DECIDING"
    GRANTED = "GRANTED"
    REFUSED = "REFUSED"


class ReservationEvent(StrEnum):
    """What can happen to a submitted generation's reservation."""

    RESERVE_NEWER = "Reserve(higher n)"
    RESERVE_SAME = "Reserve(same n)"
    GRANT = "granted"
    REFUSE = "refused"
    RELEASE = "Release(n or higher)"
    EXPIRE = "time to live"
    ENDED = "ended or committed"


_S, _E = ReservationState, ReservationEvent

RESERVATION_TABLE: TransitionTable[ReservationState, ReservationEvent] = TransitionTable(
    "reservation",
    [
        (_S.SUBMITTED, _E.RESERVE_NEWER, _S.DECIDING, "the caller decides"),
        (_S.SUBMITTED, _E.RELEASE, _S.REFUSED, "refuse what comes later up to n"),
        (_S.SUBMITTED, _E.ENDED, None, "forget"),
        (_S.DECIDING, _E.GRANT, _S.GRANTED, "send the grant with what is lacked"),
        (_S.DECIDING, _E.REFUSE, _S.REFUSED, "send the refusal"),
        (_S.DECIDING, _E.ENDED, None, "forget"),
        (_S.GRANTED, _E.RESERVE_SAME, _S.GRANTED, "give the old answer again"),
        (
            _S.GRANTED,
            _E.RESERVE_NEWER,
            _S.DECIDING,
            "the caller frees the old one, then decides",
        ),
        (_S.GRANTED, _E.RELEASE, _S.REFUSED, "the caller frees it"),
        (_S.GRANTED, _E.EXPIRE, _S.REFUSED, "the caller frees it"),
        (_S.GRANTED, _E.ENDED, None, "forget; the caller frees it, or keeps it if committed"),
        (_S.REFUSED, _E.RESERVE_SAME, _S.REFUSED, "give the old answer again"),
        (_S.REFUSED, _E.RESERVE_NEWER, _S.DECIDING, "the caller decides"),
        (_S.REFUSED, _E.RELEASE, _S.REFUSED, "refuse what comes later up to n"),
        (_S.REFUSED, _E.ENDED, None, "forget"),
    ],
)


class RequestState(StrEnum):
    """Where the prefill worker's request for memory is."""

    WAITING = "WAITING"
    GRANTED = "GRANTED"


class RequestEvent(StrEnum):
    """What can happen to a request for a reservation."""

    GRANTED = "Reserved(granted, this n)"
    REFUSED = "Reserved(refused, this n)"
    TIME_OUT = "time-out"
    GIVE_BACK = "give_back"
    PEER_LOST = "peer lost"
    HANDED_OVER = "handed over"


RESERVATION_REQUEST_TABLE: TransitionTable[RequestState, RequestEvent] = TransitionTable(
    "request for a reservation",
    [
        (
            RequestState.WAITING,
            RequestEvent.GRANTED,
            RequestState.GRANTED,
            "inform the caller of what is lacked",
        ),
        (
            RequestState.WAITING,
            RequestEvent.REFUSED,
            None,
            "inform the caller",
        ),
        (
            RequestState.WAITING,
            RequestEvent.TIME_OUT,
            None,
            "counts as refused; send Release(n)",
        ),
        (
            RequestState.WAITING,
            RequestEvent.GIVE_BACK,
            None,
            "send Release(n)",
        ),
        (
            RequestState.WAITING,
            RequestEvent.PEER_LOST,
            None,
            "counts as refused",
        ),
        (
            RequestState.GRANTED,
            RequestEvent.GIVE_BACK,
            None,
            "send Release(n)",
        ),
        (
            RequestState.GRANTED,
            RequestEvent.PEER_LOST,
            None,
            "forget: the lease ends by itself",
        ),
        (
            RequestState.GRANTED,
            RequestEvent.HANDED_OVER,
            None,
            "forget: the lease is sealed, its end is the reservation's",
        ),
    ],
)
