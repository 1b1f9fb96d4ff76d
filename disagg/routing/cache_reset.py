"""Resets of all workers' prefix caches: one at a time, each answered by every worker."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from disagg.errors import CapacityError, RemoteFault
from disagg.messages.identity import Incarnation
from disagg.messages.session import PrefixCacheReset, ResetPrefixCache
from disagg.routing.actions import CacheResetEnded, RouterAction, ToWorker, WorkerReset
from disagg.routing.fleet import WORKERS_MAX, WorkerView

ANSWERS_MS = 10_000
"""A worker that has not answered by then counts as not reset."""


@dataclass(slots=True)
class _UnderWay:
    answers: dict[Incarnation, WorkerReset | None]
    until_ms: int


class CacheResets:
    """The reset that is under way, and which workers have missed the last one.

    A worker that was away meanwhile is reset as soon as its session is open again, before any
    request reaches it. Then it holds as well that no request that was submitted after the reset
    finds anything from before it.

    Args:
        counters: the router's.

    Attributes:
        begun_ms: when the last one began; -1 before the first.
    """

    def __init__(self, counters: Counter[tuple[str, str]]) -> None:
        self._counters = counters
        self.begun_ms = -1
        self._number = 0
        self._under_way: _UnderWay | None = None
        self._last_done: dict[Incarnation, int] = {}

    def has_reset(self, incarnation: Incarnation) -> bool:
        """Whether a worker is known to have got the last one: else nobody pulls a prefix of it."""
        return not self._number or self._last_done.get(incarnation) == self._number

    def begin(self, now_ms: int, views: Iterable[WorkerView]) -> list[RouterAction]:
        """Send a reset to every worker that is connected.

        Raises:
            CapacityError: one is under way.
            RemoteFault: no worker is connected, so nothing was reset.
        """
        if self._under_way is not None:
            raise CapacityError("another reset of the prefix caches is under way")
        connected = {view.info.incarnation: view.connected for view in views}
        if not any(connected.values()):
            raise RemoteFault("no worker is connected: nothing was reset")
        self._number += 1
        self.begun_ms = now_ms
        away = "has no session now; it is reset before the next request reaches it"
        self._under_way = _UnderWay(
            {who: None if up else WorkerReset(who, error=away) for who, up in connected.items()},
            now_ms + ANSWERS_MS,
        )
        return [
            ToWorker(who, ResetPrefixCache(self._number)) for who, up in connected.items() if up
        ]

    def session_up(self, incarnation: Incarnation) -> list[RouterAction]:
        """The reset that a worker may have missed, before anything else is sent to it."""
        if self.has_reset(incarnation):
            return []
        return [ToWorker(incarnation, ResetPrefixCache(self._number))]

    def answered(self, incarnation: Incarnation, answer: PrefixCacheReset) -> list[RouterAction]:
        """Keep a worker's answer; the last one ends the reset."""
        if answer.number != self._number:
            return []
        if not answer.refused:
            self._last_done[incarnation] = answer.number
            if len(self._last_done) > WORKERS_MAX:
                del self._last_done[next(iter(self._last_done))]
        reset = WorkerReset(incarnation, answer.num_forgotten, answer.in_use, answer.refused)
        return self._note(incarnation, reset)

    def lost(self, incarnation: Incarnation, cause: str) -> list[RouterAction]:
        """A worker has left the fleet; what it has is unknown if it had not answered."""
        return self._note(incarnation, WorkerReset(incarnation, error=f"was lost: {cause}"))

    def expire(self, now_ms: int) -> list[RouterAction]:
        """End a reset that some worker does not answer."""
        if self._under_way is None or now_ms < self._under_way.until_ms:
            return []
        silent = f"has not answered within {ANSWERS_MS} ms"
        return self._end(self._under_way, silent)

    def _note(self, incarnation: Incarnation, reset: WorkerReset) -> list[RouterAction]:
        now = self._under_way
        if now is None or now.answers.get(incarnation, reset) is not None:
            return []
        now.answers[incarnation] = reset
        return [] if None in now.answers.values() else self._end(now, "")

    def _end(self, ended: _UnderWay, silent: str) -> list[RouterAction]:
        self._under_way = None
        workers = (
            answer or WorkerReset(who, error=silent) for who, answer in ended.answers.items()
        )
        reset = CacheResetEnded(self._number, tuple(sorted(workers, key=lambda one: one.worker)))
        self._counters["cache_resets", "complete" if reset.complete else "incomplete"] += 1
        return [reset]
