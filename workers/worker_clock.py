"""The clock of a worker's decisions: it stands still while the worker does."""

import time
from collections.abc import Callable

STEP_MS_MAX = 1_000
"""Goes by at most between two readings. The control thread reads it at every tick, so a longer gap
is a process that was stopped, a suspended machine, or a starved thread."""


def monotonic_ms() -> int:
    """Milliseconds of this machine's monotonic clock."""
    return time.monotonic_ns() // 1_000_000


class WorkerClock:
    """Milliseconds in which the worker ran; never compared between processes.

    Bounds on waiting count only time in which what is waited for could have been heard of: a worker
    that wakes from a stop of a minute first hears what happened, and then judges who stands still.
    Whatever is held meanwhile is held longer, which is always safe.

    Args:
        read_ms: milliseconds that also pass while the process stands still.
    """

    def __init__(self, read_ms: Callable[[], int] = monotonic_ms) -> None:
        self._read_ms = read_ms
        self._last_ms = read_ms()
        self._now_ms = self._last_ms

    def now_ms(self) -> int:
        """The time; to be read by one thread, often."""
        read_ms = self._read_ms()
        self._now_ms += min(read_ms - self._last_ms, STEP_MS_MAX)
        self._last_ms = read_ms
        return self._now_ms
