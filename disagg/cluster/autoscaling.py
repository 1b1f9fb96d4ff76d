"""How many workers of each role the time that requests wait asks for; no I/O, no clock."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from disagg.cluster.counts import Counts

LOW_SHARE = 0.25
"""Of the wanted queue time: below it there may be one worker too many."""
FAILED_MAX = 6
"""A count that was too few is tried again after twice the time, doubled so often at most."""
SHARE_BELOW = 0.9
"""So many of the requests wait at most as long as the queue time that is looked at."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One request, in a queue or just out of it.

    Attributes:
        received_ms: when it came.
        waited_ms: how long it waited, or has waited so far.
    """

    received_ms: int
    waited_ms: int


@dataclass(frozen=True, slots=True)
class AutoscaleOptions:
    """What the automatic mode keeps to.

    Attributes:
        ranges: fewest and most workers by role; other roles are left alone.
        target_queue_ms: requests are to wait no longer.
        up_after_ms: they have waited longer for all this time, before there is one worker more.
        down_after_ms: they have hardly waited for all this time, before there is one fewer.
    """

    ranges: Mapping[str, tuple[int, int]]
    target_queue_ms: int
    up_after_ms: int
    down_after_ms: int


@dataclass(slots=True)
class _Role:
    """What is remembered of a role.

    Attributes:
        fresh_ms: who came before that waited for a worker that was still to come.
        high_since_ms: since then requests have waited too long; None: they have not.
        high_from_ms: how long they waited then.
        low_since_ms: since then they have hardly waited; None: they have.
        cold_since_ms: since then a worker has been to come; None: all serve.
        settled_ms: until then what waited for a worker that came is still worked off.
        num_failed: how often each count was too few, since it was last more than enough.
    """

    fresh_ms: int = 0
    high_since_ms: int | None = None
    high_from_ms: int = 0
    low_since_ms: int | None = None
    cold_since_ms: int | None = None
    settled_ms: int = 0
    num_failed: Counter[int] = field(default_factory=Counter)


class Autoscaling:
    """One step at a time, up or down, for each role by itself.

    Up when requests have waited too long for a while and do not wait less and less; then not again
    before the new worker serves, or was given up as requests hardly waited without it. Who came
    before that waited for a cold start, which says nothing of how many workers there should be, and
    does not count; what they left behind is given as long to be worked off as the start took. Down
    when requests have hardly waited for long; between the two marks nothing happens. Whether one
    worker fewer is enough is known only by trying: a count that was too few is tried again after
    twice the time.

    Attributes:
        reasons: why the last decision changed what it changed, by role.
    """

    def __init__(self, options: AutoscaleOptions) -> None:
        self._options = options
        self._roles = {role: _Role() for role in options.ranges}
        self.reasons: dict[str, str] = {}

    def decide(
        self,
        now_ms: int,
        counts: Counts,
        ready: Mapping[str, int],
        waits: Mapping[str, Sequence[Wait]] | None,
    ) -> Counts:
        """Look at how long requests wait; returns how many workers are wanted now.

        Args:
            now_ms: by the clock of ``received_ms``.
            counts: wanted so far.
            ready: how many of each role serve; the rest is still to come.
            waits: of the last seconds by role; None: nobody knows, so nothing changes.
        """
        wanted = counts.by_role
        self.reasons = {}
        for role, state in self._roles.items():
            count = wanted[role]
            low, high = self._options.ranges[role]
            if not low <= count <= high:
                wanted[role] = min(max(count, low), high)
                self.reasons[role] = f"{role} has a range of {low}-{high}"
                continue
            if waits is None:
                state.high_since_ms = state.low_since_ms = None
                continue
            step = self._step(now_ms, role, count, ready.get(role, 0), waits.get(role, ()))
            wanted[role] += step
        return replace(counts, **wanted)

    def _step(
        self, now_ms: int, role: str, count: int, num_ready: int, waits: Sequence[Wait]
    ) -> int:
        state, options = self._roles[role], self._options
        low, high = options.ranges[role]
        if num_ready < count:  # one is to come, and may be enough
            if state.cold_since_ms is None:
                state.cold_since_ms = now_ms
            state.fresh_ms = now_ms
            state.high_since_ms = None
            queue_ms = queue_time(waits, float("-inf"))
            if not self._is_low(now_ms, state, queue_ms, count) or count <= low:
                return 0
            # It may never come: where there is no room for it, or it ends as often as it starts.
            state.cold_since_ms = state.low_since_ms = None
            del state.num_failed[count]
            self.reasons[role] = f"requests wait {queue_ms} ms for {role} without the one to come"
            return -1
        if state.cold_since_ms is not None:
            state.settled_ms = now_ms + now_ms - state.cold_since_ms
            state.cold_since_ms = None
        queue_ms = queue_time(waits, state.fresh_ms)
        step = 0
        if self._is_high(now_ms, state, queue_ms) and count < high:
            step = 1
            state.num_failed[count] = min(FAILED_MAX, state.num_failed[count] + 1)
        elif self._is_low(now_ms, state, queue_ms, count) and count > low:
            step = -1
            del state.num_failed[count]
        if step:
            state.high_since_ms = state.low_since_ms = None
            self.reasons[role] = f"requests wait {queue_ms} ms for {role}"
        return step

    def _is_high(self, now_ms: int, state: _Role, queue_ms: int) -> bool:
        """Whether requests have waited too long for long enough, and it gets no better."""
        if queue_ms <= self._options.target_queue_ms or now_ms < state.settled_ms:
            state.high_since_ms = None
            return False
        if state.high_since_ms is None:
            state.high_since_ms, state.high_from_ms = now_ms, queue_ms
        if now_ms - state.high_since_ms < self._options.up_after_ms:
            return False
        if queue_ms < state.high_from_ms:
            state.high_since_ms, state.high_from_ms = now_ms, queue_ms
            return False
        return True

    def _is_low(self, now_ms: int, state: _Role, queue_ms: int, count: int) -> bool:
        """Whether requests have hardly waited for so long that one worker fewer is worth a try."""
        if queue_ms > LOW_SHARE * self._options.target_queue_ms:
            state.low_since_ms = None
            return False
        if state.low_since_ms is None:
            state.low_since_ms = now_ms
        wait_ms = self._options.down_after_ms << state.num_failed[count - 1]
        return now_ms - state.low_since_ms >= wait_ms


def queue_time(waits: Sequence[Wait], since_ms: float) -> int:
    """How long most requests wait, of those that came since; 0 where there are none."""
    found = sorted(wait.waited_ms for wait in waits if wait.received_ms >= since_ms)
    return found[min(len(found) - 1, int(SHARE_BELOW * len(found)))] if found else 0
