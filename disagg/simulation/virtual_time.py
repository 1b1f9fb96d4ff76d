"""Time that goes by only where something happens."""

import heapq
from collections.abc import Callable

from disagg.errors import InvariantViolation

Event = Callable[[], None]


class VirtualTime:
    """A clock and what is to happen; equal times happen in the order in which they were planned.

    Attributes:
        now_ms: the time; it never goes backwards.
        num_events: that have happened.
    """

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_events = 0
        self._last = 0
        self._events: list[tuple[float, int, Event]] = []

    @property
    def clock_ms(self) -> int:
        """The time as the cores take it: whole milliseconds, as in production."""
        return int(self.now_ms)

    @property
    def num_planned(self) -> int:
        """Events that are still to happen."""
        return len(self._events)

    @property
    def next_ms(self) -> float:
        """When the next one does; now where there is none."""
        return self._events[0][0] if self._events else self.now_ms

    def after(self, delay_ms: float, happen: Event) -> None:
        """Let something happen after a delay of at least 0."""
        if delay_ms < 0:
            raise InvariantViolation(f"an event {-delay_ms} ms ago")
        self._last += 1
        heapq.heappush(self._events, (self.now_ms + delay_ms, self._last, happen))

    def advance(self) -> bool:
        """Let the next thing happen; False where nothing is left."""
        if not self._events:
            return False
        self.now_ms, _, happen = heapq.heappop(self._events)
        self.num_events += 1
        happen()
        return True
