"""Reservations, at the decode worker: each is answered at once, and each number only once."""

from dataclasses import dataclass

from disagg.errors import InvariantViolation
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import Release, Reserve, Reserved
from disagg.transfer.reservation.states import (
    RESERVATION_TABLE,
    ReservationEvent,
    ReservationState,
)


@dataclass(frozen=True, slots=True)
class Decide:
    """The caller decides now and calls ``decided``."""

    key: RequestKey
    number: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """A repeated request: send the old answer again."""

    message: Reserved


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is refused, whatever there is room for."""

    message: Reserved


@dataclass(frozen=True, slots=True)
class Ignore:
    """An older request: the prefill worker has moved on."""


@dataclass(slots=True)
class _Reservation:
    owner: Incarnation
    state: ReservationState = ReservationState.SUBMITTED
    number: int = 0
    """Highest seen."""
    released: int = 0
    """Refuse up to here."""
    answer: Reserved | None = None
    expires_ms: int = 0


class ReservationTable:
    """At most one reservation per submitted, live generation; forgotten when it ends.

    Args:
        ttl_ms: a granted reservation is given up when its hand-over stands still for so long.
    """

    def __init__(self, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        self._entries: dict[RequestKey, _Reservation] = {}

    def submitted(self, now_ms: int, key: RequestKey, owner: Incarnation) -> None:
        """The router submitted a generation here; only ``owner`` may reserve for it."""
        self._entries.setdefault(key, _Reservation(owner))

    def ended(self, key: RequestKey) -> bool:
        """The generation ended here, or its transfer is committed; later requests are refused.

        Returns:
            Whether a reservation was granted: the caller must free it, unless it is committed
            and the memory is the request's.
        """
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        RESERVATION_TABLE.leave(entry.state, ReservationEvent.ENDED)
        return entry.state is ReservationState.GRANTED

    def consider(self, sender: Incarnation, reserve: Reserve) -> Decide | Repeat | Refuse | Ignore:
        """What to do with a request; after `Decide` the caller must call `decided`."""
        key, number = reserve.key, reserve.number
        entry = self._entries.get(key)
        if entry is None:
            return _refuse(reserve, "the generation is not submitted here, or has ended")
        if entry.owner != sender:
            return _refuse(reserve, f"the generation's prefill is on {entry.owner}")
        if number <= entry.released:
            return _refuse(reserve, "the reservation was released")
        if number > entry.number:
            entry.state = RESERVATION_TABLE.move(entry.state, ReservationEvent.RESERVE_NEWER)
            entry.number, entry.answer = number, None
            return Decide(key, number)
        if number < entry.number or entry.answer is None:
            return Ignore()
        RESERVATION_TABLE.move(entry.state, ReservationEvent.RESERVE_SAME)
        return Repeat(entry.answer)

    def decided(
        self,
        now_ms: int,
        key: RequestKey,
        number: int,
        granted: bool,
        reason: str = "",
        first_lacked: tuple[int, ...] = (),
    ) -> Reserved:
        """Note the decision; returns the answer to send.

        Args:
            now_ms: the time; the reservation lives from now.
            key: as in `Decide`.
            number: as in `Decide`.
            granted: whether the memory is held.
            reason: of a refusal.
            first_lacked: of a grant, per group, position of the first token to be offered.

        Raises:
            InvariantViolation: nothing was to be decided under this key and number.
        """
        entry = self._entries.get(key)
        if entry is None or entry.number != number:
            raise InvariantViolation(f"{key}: reservation {number} was not to be decided")
        event = ReservationEvent.GRANT if granted else ReservationEvent.REFUSE
        entry.state = RESERVATION_TABLE.move(entry.state, event)
        entry.answer = Reserved(key, number, granted, reason, first_lacked)
        entry.expires_ms = now_ms + self._ttl_ms
        return entry.answer

    def renew(self, now_ms: int, key: RequestKey) -> None:
        """The hand-over of a granted reservation goes on; nothing if there is none."""
        entry = self._entries.get(key)
        if entry is not None and entry.state is ReservationState.GRANTED:
            entry.expires_ms = now_ms + self._ttl_ms

    def on_release(self, sender: Incarnation, release: Release) -> bool:
        """Free reservations up to a number and refuse later arrivals up to it.

        Returns:
            Whether one was granted: the caller must free it.
        """
        entry = self._entries.get(release.key)
        if (
            entry is None
            or entry.owner != sender
            or not RESERVATION_TABLE.allows(entry.state, ReservationEvent.RELEASE)
        ):
            return False
        entry.released = max(entry.released, release.number)
        if entry.number > release.number:
            return False
        frees = entry.state is ReservationState.GRANTED
        entry.state = RESERVATION_TABLE.move(entry.state, ReservationEvent.RELEASE)
        return frees

    def expire(self, now_ms: int) -> list[RequestKey]:
        """Generations whose granted reservation outlived its time; the caller frees them."""
        keys: list[RequestKey] = []
        for key, entry in self._entries.items():
            if entry.state is ReservationState.GRANTED and entry.expires_ms <= now_ms:
                entry.state = RESERVATION_TABLE.move(entry.state, ReservationEvent.EXPIRE)
                entry.released = entry.number
                keys.append(key)
        return keys

    def next_expiry_ms(self) -> int | None:
        """When `expire` has something to do; None if nothing is granted."""
        granted = (e for e in self._entries.values() if e.state is ReservationState.GRANTED)
        return min((entry.expires_ms for entry in granted), default=None)

    @property
    def num_granted(self) -> int:
        """Reservations whose memory is held and whose transfer is not committed."""
        return sum(e.state is ReservationState.GRANTED for e in self._entries.values())


def _refuse(reserve: Reserve, reason: str) -> Refuse:
    return Refuse(Reserved(reserve.key, reserve.number, False, reason))
