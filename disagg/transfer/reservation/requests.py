"""Requests for reservations, at the prefill worker: send, wait a bounded time, give back."""

from dataclasses import dataclass

from disagg.errors import InvariantViolation
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Release, Reserve, Reserved
from disagg.transfer.actions import Send
from disagg.transfer.reservation.states import (
    RESERVATION_REQUEST_TABLE,
    RequestEvent,
    RequestState,
)


@dataclass(frozen=True, slots=True)
class Granted:
    """The decode worker holds the memory; open the lease."""

    key: RequestKey
    first_lacked: tuple[int, ...]
    """Per group: index of the first block that must be offered."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Refused, or not answered in time; give back what is held and try later."""

    key: RequestKey
    reason: str


@dataclass(slots=True)
class _Request:
    number: int
    peer: Incarnation
    expires_ms: int
    state: RequestState = RequestState.WAITING


class ReservationRequests:
    """Requests of this incarnation: one per generation whose turn it is.

    Args:
        timeout_ms: a request that is not answered by then counts as refused.
    """

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._last_number = 0
        """Counts up over all generations, so that nothing is kept per generation."""
        self._entries: dict[RequestKey, _Request] = {}

    def ask(self, now_ms: int, key: RequestKey, peer: Incarnation) -> Send:
        """Request memory for a hand-over, under a new number.

        Raises:
            InvariantViolation: an earlier reservation of the generation was not given back.
        """
        if key in self._entries:
            raise InvariantViolation(f"{key} has a reservation already, or a request for one")
        self._last_number += 1
        self._entries[key] = _Request(self._last_number, peer, now_ms + self._timeout_ms)
        return Send(peer, Reserve(key, self._last_number))

    def on_answer(
        self, now_ms: int, sender: Incarnation, answer: Reserved
    ) -> Granted | Refused | Send | None:
        """An answer arrived.

        Returns:
            The decision, the first time it arrives; a `Send` that releases what a stale grant
            took; None for everything else.
        """
        entry = self._entries.get(answer.key)
        current = entry and (entry.peer, entry.number) == (sender, answer.number)
        if entry is None or not current:
            # The grant of a request given up: its Release may have come before it, or be lost.
            stale = answer.granted and 0 < answer.number <= self._last_number
            return Send(sender, Release(answer.key, answer.number)) if stale else None
        event = RequestEvent.GRANTED if answer.granted else RequestEvent.REFUSED
        if not RESERVATION_REQUEST_TABLE.allows(entry.state, event):
            return None
        if not answer.granted:
            self._leave(answer.key, event)
            return Refused(answer.key, answer.reason)
        entry.state = RESERVATION_REQUEST_TABLE.move(entry.state, event)
        return Granted(answer.key, answer.first_lacked)

    def give_back(self, key: RequestKey) -> list[Send]:
        """Release the reservation or withdraw the request; nothing if there is none."""
        return [self._release(key, RequestEvent.GIVE_BACK)] if key in self._entries else []

    def handed_over(self, key: RequestKey) -> None:
        """The lease is sealed: forget the reservation, whose end is the lease's from now on."""
        if key in self._entries:
            self._leave(key, RequestEvent.HANDED_OVER)

    def tick(self, now_ms: int) -> list[Refused | Send]:
        """Time-outs: each a `Refused`, followed by the Release that makes it true."""
        late = [k for k, one in self._waiting() if one.expires_ms <= now_ms]
        actions: list[Refused | Send] = []
        for key in late:
            actions += [
                Refused(key, "timeout"),
                self._release(key, RequestEvent.TIME_OUT),
            ]
        return actions

    def next_deadline_ms(self) -> int | None:
        """When `tick` has something to do; None if no answer is awaited."""
        return min((one.expires_ms for _, one in self._waiting()), default=None)

    def on_peer_lost(self, peer: Incarnation) -> list[Refused]:
        """A decode worker is gone: forget what it granted; what it has not answered is refused."""
        lost = [(key, one.state) for key, one in self._entries.items() if one.peer == peer]
        for key, _ in lost:
            self._leave(key, RequestEvent.PEER_LOST)
        return [Refused(key, "peer_lost") for key, state in lost if state is RequestState.WAITING]

    def _waiting(self) -> list[tuple[RequestKey, _Request]]:
        return [(k, one) for k, one in self._entries.items() if one.state is RequestState.WAITING]

    def _release(self, key: RequestKey, event: RequestEvent) -> Send:
        entry = self._leave(key, event)
        return Send(entry.peer, Release(key, entry.number))

    def _leave(self, key: RequestKey, event: RequestEvent) -> _Request:
        RESERVATION_REQUEST_TABLE.leave(self._entries[key].state, event)
        return self._entries.pop(key)
