"""The prefill worker's side of a reservation: ask, wait a bounded time, give back."""

from dataclasses import dataclass

from disagg.errors import InvariantViolation
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Release, Reserve, Reserved
from disagg.transfer.actions import Send
from disagg.transfer.reservation_states import ASK_TABLE, AskEvent, AskState


@dataclass(frozen=True, slots=True)
class Granted:
    """The decode worker holds the memory; open the lease."""

    key: RequestKey
    first_lacked: tuple[int, ...]
    """Per group: first block position that must be offered."""


@dataclass(frozen=True, slots=True)
class Refused:
    """No, or no answer in time; give back what is held and try later."""

    key: RequestKey
    reason: str


@dataclass(slots=True)
class _Question:
    number: int
    peer: Incarnation
    expires_ms: int
    state: AskState = AskState.WAITING


class ReserveAsker:
    """Questions of this incarnation: one per generation whose turn it is.

    Args:
        timeout_ms: no answer by then counts as no.
    """

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._last_number = 0
        """Counts up over all generations, so that nothing is kept per generation."""
        self._entries: dict[RequestKey, _Question] = {}

    def ask(self, now_ms: int, key: RequestKey, peer: Incarnation) -> Send:
        """Ask for memory, under a new number.

        Raises:
            InvariantViolation: an earlier reservation of the generation was not given back.
        """
        if key in self._entries:
            raise InvariantViolation(f"{key} has asked already")
        self._last_number += 1
        self._entries[key] = _Question(self._last_number, peer, now_ms + self._timeout_ms)
        return Send(peer, Reserve(key, self._last_number))

    def on_answer(
        self, now_ms: int, sender: Incarnation, answer: Reserved
    ) -> Granted | Refused | Send | None:
        """An answer arrived.

        Returns:
            The decision, the first time it is heard; a `Send` that releases what a stale yes
            granted; None for everything else.
        """
        entry = self._entries.get(answer.key)
        current = entry and (entry.peer, entry.number) == (sender, answer.number)
        if entry is None or not current:
            # The yes of a question we gave up: its Release may have come before it, or be lost.
            stale = answer.granted and 0 < answer.number <= self._last_number
            return Send(sender, Release(answer.key, answer.number)) if stale else None
        event = AskEvent.YES if answer.granted else AskEvent.NO
        if not ASK_TABLE.allows(entry.state, event):
            return None
        if not answer.granted:
            self._leave(answer.key, event)
            return Refused(answer.key, answer.reason)
        entry.state = ASK_TABLE.move(entry.state, event)
        return Granted(answer.key, answer.first_lacked)

    def give_back(self, key: RequestKey) -> list[Send]:
        """Release the reservation or withdraw the question; nothing if there is none."""
        return [self._release(key, AskEvent.GIVE_BACK)] if key in self._entries else []

    def handed_over(self, key: RequestKey) -> None:
        """The lease is sealed: forget the reservation, whose end is the lease's from now on."""
        if key in self._entries:
            self._leave(key, AskEvent.HANDED_OVER)

    def tick(self, now_ms: int) -> list[Refused | Send]:
        """Time-outs: each a `Refused`, followed by the Release that makes it true."""
        late = [k for k, one in self._waiting() if one.expires_ms <= now_ms]
        actions: list[Refused | Send] = []
        for key in late:
            actions += [Refused(key, "timeout"), self._release(key, AskEvent.TIME_OUT)]
        return actions

    def next_deadline_ms(self) -> int | None:
        """When `tick` has something to do; None if no answer is awaited."""
        return min((one.expires_ms for _, one in self._waiting()), default=None)

    def on_peer_lost(self, peer: Incarnation) -> list[Refused]:
        """A decode worker is gone: forget what it granted; what it has not answered is a no."""
        lost = [(key, one.state) for key, one in self._entries.items() if one.peer == peer]
        for key, _ in lost:
            self._leave(key, AskEvent.PEER_LOST)
        return [Refused(key, "peer_lost") for key, state in lost if state is AskState.WAITING]

    def _waiting(self) -> list[tuple[RequestKey, _Question]]:
        return [(k, one) for k, one in self._entries.items() if one.state is AskState.WAITING]

    def _release(self, key: RequestKey, event: AskEvent) -> Send:
        entry = self._leave(key, event)
        return Send(entry.peer, Release(key, entry.number))

    def _leave(self, key: RequestKey, event: AskEvent) -> _Question:
        ASK_TABLE.leave(self._entries[key].state, event)
        return self._entries.pop(key)
