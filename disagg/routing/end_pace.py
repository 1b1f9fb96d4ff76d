"""How fast requests end here: what a client that was refused is told to wait."""

from collections import deque
from math import ceil

ENDS_MAX = 64
RETRY_AFTER_MAX_S = 60


class EndPace:
    """Times of the last ends of requests; time in which there were none does not count."""

    def __init__(self) -> None:
        self._ends_ms: deque[int] = deque(maxlen=ENDS_MAX)
        """Of the time with requests."""
        self._without_ms = 0
        """Time without any, before those."""
        self._seen_ms = 0

    def note(self, now_ms: int) -> None:
        """A request ended, however."""
        self._ends_ms.append(now_ms - self._without_ms)
        self._seen_ms = now_ms

    def see(self, now_ms: int, *, idle: bool) -> None:
        """Without any request since it was seen last nothing could end: that is no slow pace."""
        if idle:
            self._without_ms += now_ms - self._seen_ms
        self._seen_ms = now_ms

    def retry_after_s(self, now_ms: int, num_ends: int) -> int:
        """Seconds in which so many requests will have ended, from 1 to `RETRY_AFTER_MAX_S`.

        The time since the last end counts too: where nothing ends any more, the answer grows. 1
        before anything has ended.
        """
        if not self._ends_ms:
            return 1
        each_ms = (now_ms - self._without_ms - self._ends_ms[0]) / len(self._ends_ms)
        return max(1, min(RETRY_AFTER_MAX_S, ceil(each_ms * num_ends / 1000)))
