"""Resets of all workers' prefix caches: one at a time, each answered by every worker."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from disagg.errors import CapacityError, RemoteFault
from disagg.messages.identity import Incarnation
from disagg.messages.session import PrefixCacheReset, ResetPrefixCache
from disagg.routing.actions import CacheResetEnded, RouterAction, ToWorker, WorkerReset
from disagg.routing.fleet import WORKERS_MAX
from disagg.routing.worker_view import WorkerView

ANSWERS_MS = 10_000
"""A worker that has not answered by then counts as not reset."""
RESETS_MAX = 16
"""Routers whose last reset is remembered."""


@dataclass(slots=True)
class _UnderWay:
    answers: dict[Incarnation, WorkerReset | None]
    until_ms: int


class _Reset(NamedTuple):
    """One reset, wherever it was begun."""

    router: str
    number: int

    def is_before(self, other: "_Reset") -> bool:
        """Whether the same router has begun the other one later."""
        return self.router == other.router and self.number < other.number


class CacheResets:
    """The reset that is under way, and which workers have missed one.

    A worker that was away meanwhile is reset as soon as its session is open again, before any
    request reaches it. Then it holds as well that no request that was submitted after the reset
    finds anything from before it.

    Other routers begin resets of their own: workers tell every router what they forgot. The first
    to tell of such a reset has it sent on to all of them, so that it is done in the order of this
    router's requests as well; nothing is pulled of a worker before it has done it.

    Args:
        counters: the router's.
        router_id: this router's; it names the resets that are begun here.

    Attributes:
        begun_ms: when the last one began; -1 before the first.
    """

    def __init__(self, counters: Counter[tuple[str, str]], router_id: str = "") -> None:
        self._counters = counters
        self._router_id = router_id
        self.begun_ms = -1
        self._number = 0
        self._under_way: _UnderWay | None = None
        self._done: dict[_Reset, set[Incarnation]] = {}
        """The last reset of every router, and who is known to have done it."""

    def has_reset(self, incarnation: Incarnation) -> bool:
        """Whether a worker is known to have got all: else nobody pulls a prefix of it."""
        return all(incarnation in done for done in self._done.values())

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
        away = "has no session now; it is reset before the next request reaches it"
        self._under_way = _UnderWay(
            {who: None if up else WorkerReset(who, error=away) for who, up in connected.items()},
            now_ms + ANSWERS_MS,
        )
        workers = (who for who, up in connected.items() if up)
        return self._send(now_ms, _Reset(self._router_id, self._number), workers)

    def session_up(self, incarnation: Incarnation) -> list[RouterAction]:
        """The resets that a worker may have missed, before anything else is sent to it."""
        missed = (reset for reset, done in self._done.items() if incarnation not in done)
        return [ToWorker(incarnation, ResetPrefixCache(one.number, one.router)) for one in missed]

    def answered(
        self,
        now_ms: int,
        incarnation: Incarnation,
        answer: PrefixCacheReset,
        views: Iterable[WorkerView],
    ) -> list[RouterAction]:
        """Keep a worker's answer; the last one ends a reset that was begun here."""
        reset = _Reset(answer.router, answer.number)
        own = reset.router == self._router_id
        actions: list[RouterAction] = []
        if reset not in self._done:
            if own or any(reset.is_before(known) for known in self._done):
                return []  # a late one of an earlier reset
            connected = (view.info.incarnation for view in views if view.connected)
            actions += self._send(now_ms, reset, connected)
        elif not answer.refused:
            done = self._done[reset]
            done.add(incarnation)
            if len(done) > WORKERS_MAX:
                done.pop()
        if not own:
            return actions
        made = WorkerReset(incarnation, answer.num_forgotten, answer.in_use, answer.refused)
        return self._note(incarnation, made)

    def _send(
        self, now_ms: int, reset: _Reset, workers: Iterable[Incarnation]
    ) -> list[RouterAction]:
        """From now on nobody counts as reset who has not done this one; a router's last counts."""
        self.begun_ms = now_ms
        self._done = {
            known: done for known, done in self._done.items() if known.router != reset.router
        }
        self._done[reset] = set()
        if len(self._done) > RESETS_MAX:
            del self._done[next(iter(self._done))]
        order = ResetPrefixCache(reset.number, reset.router)
        return [ToWorker(worker, order) for worker in workers]

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
