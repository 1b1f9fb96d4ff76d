"""States of a reader's question for a lease: `AskLease` or `TakeOver`."""

from enum import StrEnum

from disagg.transfer.transitions import TransitionTable


class QuestionState(StrEnum):
    """Where a question is."""

    ASKED = "ASKED"
    ANSWERED = "ANSWERED"


class QuestionEvent(StrEnum):
    """What can happen to a question."""

    REPEAT = "interval"
    LEASE = "Offers(this n)"
    NONE = "dead Offers(this n)"
    TIME_OUT = "time-out"
    GIVE_UP = "give_up"
    PEER_LOST = "peer lost"
    FINISH = "committed"


_S, _E = QuestionState, QuestionEvent

QUESTION_TABLE: TransitionTable[QuestionState, QuestionEvent] = TransitionTable(
    "question",
    [
        (_S.ASKED, _E.REPEAT, _S.ASKED, "send the same question again"),
        (_S.ASKED, _E.LEASE, _S.ANSWERED, "begin the inbound transfer up to the answer's boundary"),
        (_S.ASKED, _E.NONE, None, "tell the caller"),
        (_S.ASKED, _E.TIME_OUT, None, "tell the caller; send WithdrawLease(n)"),
        (_S.ASKED, _E.GIVE_UP, None, "send WithdrawLease(n)"),
        (_S.ASKED, _E.PEER_LOST, None, "tell the caller"),
        (_S.ANSWERED, _E.LEASE, _S.ANSWERED, "a repetition: pass it on to the inbound transfer"),
        (_S.ANSWERED, _E.NONE, _S.ANSWERED, "pass it on to the inbound transfer, which fails"),
        (_S.ANSWERED, _E.TIME_OUT, None, "tell the caller; send WithdrawLease(n)"),
        (_S.ANSWERED, _E.GIVE_UP, None, "send WithdrawLease(n)"),
        (_S.ANSWERED, _E.PEER_LOST, None, "forget: the inbound transfer fails"),
        (_S.ANSWERED, _E.FINISH, None, "forget: the lease is committed"),
    ],
)
