"""A worker that takes no more work lets what goes on end, for a bounded time, then ends itself."""

from enum import Enum

NOTICE_MS = 500
"""An idle worker stays so long after it said that it drains, so that routers have heard of it."""


class DrainEvent(Enum):
    """What is due in a worker that drains."""

    NOTHING = 0
    GIVE_UP = 1
    """Its time is over: what still goes on is to end."""
    DONE = 2


class Draining:
    """Since when a worker takes no work, why, and whether it should end.

    It does so for one of two reasons: READs that may still land hold too much of its pool, which
    may pass; or it was asked to end.

    Args:
        drain_ms: how long what goes on may take to end, for the first reason.

    Attributes:
        asked: it was asked to end.
    """

    def __init__(self, drain_ms: int) -> None:
        self.asked = False
        self._drain_ms = drain_ms
        self._until_ms: int | None = None
        self._stays_until_ms = 0
        self._gave_up = False

    def ask(self, now_ms: int, timeout_ms: int) -> None:
        """End the worker when nothing goes on any more, or after ``timeout_ms``; idempotent."""
        if not self.asked:
            self.asked = True
            self._until_ms = now_ms + timeout_ms
            self._stays_until_ms = now_ms + min(NOTICE_MS, timeout_ms)

    def due(self, now_ms: int, *, ready: bool, idle: bool) -> DrainEvent:
        """What a tick has to do."""
        if ready:
            self._until_ms = None
            return DrainEvent.NOTHING
        if self._until_ms is None:
            self._until_ms = now_ms + self._drain_ms
        if idle and now_ms >= self._stays_until_ms:
            return DrainEvent.DONE
        if now_ms < self._until_ms:
            return DrainEvent.NOTHING
        if not self.asked or self._gave_up:
            return DrainEvent.DONE
        self._gave_up = True
        return DrainEvent.GIVE_UP
