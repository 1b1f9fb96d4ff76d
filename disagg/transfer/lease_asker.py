"""The reader's side of asking for a lease: ask until answered, wait a bounded time, withdraw."""

from dataclasses import dataclass, replace
from enum import Enum, auto

from disagg.errors import InvariantViolation
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import AskLease, Offers, TakeOver, WithdrawLease
from disagg.transfer.actions import READ_FAULTS, Send
from disagg.transfer.question_states import QUESTION_TABLE, QuestionEvent, QuestionState


class Answer(Enum):
    """What `LeaseAsker.on_offers` heard."""

    LEASE = auto()
    """The lease is there: begin the inbound transfer, or give up."""
    NONE = auto()
    """There is no lease; the question is forgotten."""
    KNOWN = auto()
    """About a lease that is being read: the inbound table's business."""
    STALE = auto()
    """Nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """No answer, or no commit, in time; the question is withdrawn."""

    key: RequestKey


@dataclass(slots=True)
class _Question:
    owner: Incarnation
    message: AskLease | TakeOver
    expires_ms: int
    repeat_ms: int
    state: QuestionState = QuestionState.ASKED


class LeaseAsker:
    """Questions of this incarnation, at most one per generation.

    Args:
        timeout_ms: no answer by then counts as none.
        ttl_ms: nor may reading it take longer (last resort).
        repeat_ms: a question is repeated at this interval until it is answered.
    """

    def __init__(self, *, timeout_ms: int, ttl_ms: int, repeat_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._ttl_ms = ttl_ms
        self._repeat_ms = repeat_ms
        self._last_number = 0
        """Counts up over all generations, so that nothing is kept per generation."""
        self._entries: dict[RequestKey, _Question] = {}

    def ask(self, now_ms: int, owner: Incarnation, message: AskLease | TakeOver) -> Send:
        """Send a question under a new number, which takes the place of the message's.

        Raises:
            InvariantViolation: an earlier question of the generation is not over.
        """
        if message.key in self._entries:
            raise InvariantViolation(f"{message.key} has asked already")
        self._last_number += 1
        numbered = replace(message, number=self._last_number)
        self._entries[message.key] = _Question(
            owner, numbered, now_ms + self._timeout_ms, now_ms + self._repeat_ms
        )
        return Send(owner, numbered)

    def on_offers(self, now_ms: int, sender: Incarnation, offers: Offers) -> Answer:
        """An answer arrived, or a repetition of it, or the end of the lease."""
        entry = self._entries.get(offers.key)
        if entry is None or (entry.owner, entry.message.number) != (sender, offers.number):
            return Answer.STALE
        event = QuestionEvent.NONE if offers.dead else QuestionEvent.LEASE
        if entry.state is QuestionState.ANSWERED:
            QUESTION_TABLE.move(entry.state, event)
            return Answer.KNOWN
        if offers.dead:
            self._leave(offers.key, event)
            return Answer.NONE
        entry.state = QUESTION_TABLE.move(entry.state, event)
        entry.expires_ms = now_ms + self._ttl_ms
        return Answer.LEASE

    def withdrawal(self, sender: Incarnation, offers: Offers) -> list[Send]:
        """What to say to a stale answer: its lease must not wait for its time to live."""
        if offers.dead or not 0 < offers.number <= self._last_number:
            return []
        return [Send(sender, WithdrawLease(offers.key, offers.number))]

    def give_up(self, key: RequestKey, reason: str = "") -> list[Send]:
        """Withdraw a question, answered or not; nothing if there is none.

        The owner is told of READs that failed (`READ_FAULTS`), of no other ``reason``.
        """
        if key not in self._entries:
            return []
        told = reason if reason in READ_FAULTS else ""
        return [self._withdraw(key, QuestionEvent.GIVE_UP, told)]

    def finished(self, key: RequestKey) -> None:
        """The lease is committed."""
        self._leave(key, QuestionEvent.FINISH)

    def on_peer_lost(self, owner: Incarnation) -> list[RequestKey]:
        """An owner is gone; returns whose question it had not answered."""
        lost = [(key, one.state) for key, one in self._entries.items() if one.owner == owner]
        for key, _ in lost:
            self._leave(key, QuestionEvent.PEER_LOST)
        return [key for key, state in lost if state is QuestionState.ASKED]

    def tick(self, now_ms: int) -> list[TimedOut | Send]:
        """Repetitions and time-outs that are due."""
        actions: list[TimedOut | Send] = []
        for key, entry in list(self._entries.items()):
            if entry.expires_ms <= now_ms:
                actions += [self._withdraw(key, QuestionEvent.TIME_OUT), TimedOut(key)]
            elif entry.state is QuestionState.ASKED and entry.repeat_ms <= now_ms:
                QUESTION_TABLE.move(entry.state, QuestionEvent.REPEAT)
                entry.repeat_ms = now_ms + self._repeat_ms
                actions.append(Send(entry.owner, entry.message))
        return actions

    def next_deadline_ms(self) -> int | None:
        """When `tick` has something to do; None if nothing is asked."""
        return min(
            (
                min(one.expires_ms, one.repeat_ms)
                if one.state is QuestionState.ASKED
                else one.expires_ms
                for one in self._entries.values()
            ),
            default=None,
        )

    def _withdraw(self, key: RequestKey, event: QuestionEvent, reason: str = "") -> Send:
        entry = self._leave(key, event)
        return Send(entry.owner, WithdrawLease(key, entry.message.number, reason))

    def _leave(self, key: RequestKey, event: QuestionEvent) -> _Question:
        QUESTION_TABLE.leave(self._entries[key].state, event)
        return self._entries.pop(key)
