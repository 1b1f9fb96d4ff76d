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
    DONE = 2


class Draining:
    """Since when a worker takes no work, why, and whether it should end.

    It does so for one of two reasons: READs that may still land hold too much of its pool, which
    may pass; or it was asked to end.

    Args:
        drain_ms: how long what goes on may take to end, for the first reason.

    Attributes:
        asked: it was asked to end.
        gave_up: what goes on was given up; nothing is computed any more.
    """

    def __init__(self, drain_ms: int) -> None:
        self.asked = False
        self.gave_up = False
        self._drain_ms = drain_ms
        self._until_ms: int | None = None
        self._gives_up_ms = 0
        self._stays_until_ms = 0

    def ask(self, now_ms: int, timeout_ms: int) -> None:
        """End the worker when nothing goes on any more, or after ``timeout_ms``.

        Asked again, the earlier end counts.
        """
        until_ms = now_ms + timeout_ms
        if self.asked and self._until_ms is not None and self._until_ms <= until_ms:
            return
        if not self.asked:
            self._stays_until_ms = now_ms + min(NOTICE_MS, timeout_ms)
        self.asked = True
        self._until_ms = until_ms
        self._gives_up_ms = until_ms - min(timeout_ms // 4, MOVE_MS_MAX)

    def due(self, now_ms: int, *, ready: bool, idle: bool) -> DrainEvent:
        """What a tick has to do."""
        if ready:
            self._until_ms = None
            return DrainEvent.NOTHING
        if self._until_ms is None:
            self._until_ms = now_ms + self._drain_ms
        if idle and now_ms >= self._stays_until_ms:
            return DrainEvent.DONE
        if self.asked and not self.gave_up and now_ms >= self._gives_up_ms:
            self.gave_up = True
            return DrainEvent.GIVE_UP
        if now_ms >= self._until_ms:
            return DrainEvent.DONE
        return DrainEvent.GIVE_UP if self.gave_up else DrainEvent.NOTHING
