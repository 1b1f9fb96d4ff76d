"""A worker that takes no more work lets what goes on end, for a bounded time, then ends itself."""

from enum import Enum

NOTICE_MS = 500
"""An idle worker stays so long after it said that it drains, so that routers have heard of it."""
MOVE_MS_MAX = 10_000
"""The last quarter of the time to drain, but no more than this, is for what has to move."""


class DrainEvent(Enum):
    """What is due in a worker that drains."""

    NOTHING = 0
    GIVE_UP = 1
    """What still goes on is to move, or to end. It comes again until all of it has."""
    DRAINED = 2
    """It was asked to end, and nothing goes on any more, or its time is over."""
    EXIT = 3
    """READs that may still land hold too much for too long."""


class Draining:
    """Since when a worker takes no work, why, and whether it should end.

    It does so for one of two reasons: READs that may still land hold too much of its pool, which
    may pass; or it was asked to, by whoever ends it or wants its host to be free.

    Args:
        drain_ms: how long what goes on may take to end, for the first reason.

    Attributes:
        asked: it was asked to.
        gave_up: what went on was given up; nothing is computed any more.
    """

    def __init__(self, drain_ms: int) -> None:
        self.asked = False
        self.gave_up = False
        self._ends = False
        self._drain_ms = drain_ms
        self._until_ms: int | None = None
        self._gives_up_ms = 0
        self._stays_until_ms = 0

    def ask(self, now_ms: int, timeout_ms: int, *, ends: bool = True) -> None:
        """Take no work; what goes on ends within ``timeout_ms``, and then the worker if it should.

        Asked again, the earlier end counts; what was to end still does.
        """
        self._ends = self._ends or ends
        until_ms = now_ms + timeout_ms
        if self.asked and self._until_ms is not None and self._until_ms <= until_ms:
            return
        if not self.asked:
            self._stays_until_ms = now_ms + min(NOTICE_MS, timeout_ms)
        self.asked = True
        self._until_ms = until_ms
        self._gives_up_ms = until_ms - min(timeout_ms // 4, MOVE_MS_MAX)

    def call_off(self) -> None:
        """Take work again, unless the worker is to end."""
        if self.asked and not self._ends:
            self.asked = self.gave_up = False
            self._until_ms = None

    def due(self, now_ms: int, *, ready: bool, idle: bool) -> DrainEvent:
        """What a tick has to do."""
        if ready:
            self._until_ms = None
            return DrainEvent.NOTHING
        if self._until_ms is None:
            self._until_ms = now_ms + self._drain_ms
        if not self.asked:
            over = idle or now_ms >= self._until_ms
            return DrainEvent.EXIT if over else DrainEvent.NOTHING
        if idle and now_ms >= self._stays_until_ms:
            return DrainEvent.DRAINED if self._ends else DrainEvent.NOTHING
        if not self.gave_up and now_ms < self._gives_up_ms:
            return DrainEvent.NOTHING
        if self.gave_up and self._ends and now_ms >= self._until_ms:
            return DrainEvent.DRAINED
        self.gave_up = True
        return DrainEvent.GIVE_UP
