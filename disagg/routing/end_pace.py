"""How fast requests end here: what a client that was refused is told to wait."""

from collections import deque
from math import ceil

ENDS_MAX = 64
RETRY_AFTER_MAX_S = 60


class EndPace:
    """How long the last requests were at the workers, and how many are there now.

    By Little's law requests end as often as so many are there at once, divided by the mean time of
    each. So the pace of a fleet that fills is known from a time in which little was asked, and time
    without requests does not count.
    """

    def __init__(self) -> None:
        self._num = 0
        self._begun_ms = 0
        """Sum of the times at which those that are there began."""
        self._ended_ms = 0
        """Sum of what all that have ended took."""
        self._marks: deque[tuple[int, int]] = deque([(0, 0)], maxlen=ENDS_MAX + 1)
        """At each of the last ends: that sum, and the same with those that were there."""

    def begin(self, now_ms: int) -> None:
        """A request goes to its workers for the first time."""
        self._num += 1
        self._begun_ms += now_ms

    def end(self, now_ms: int, begun_ms: int) -> None:
        """A request that began then has ended, however."""
        self._num -= 1
        self._begun_ms -= begun_ms
        self._ended_ms += now_ms - begun_ms
        self._marks.append((self._ended_ms, self._ended_ms + self._ages_ms(now_ms)))

    def retry_after_s(self, now_ms: int, num_ends: int) -> int:
        """Seconds in which so many requests will have ended, from 1 to `RETRY_AFTER_MAX_S`."""
        wait_ms = num_ends * self._each_ms(now_ms) / max(1, self._num)
        return max(1, min(RETRY_AFTER_MAX_S, ceil(wait_ms / 1000)))

    def _each_ms(self, now_ms: int) -> float:
        """Mean time that a request is at the workers.

        That of the last ends, or more where those that are there now take longer: the time that all
        have spent there since, by the number of ends. It grows where nothing ends any more, and
        where some take most places for long. But where many began at once none can have ended yet,
        so it is no more than the mean age of those that are there. That is all that is known before
        the first end.
        """
        ages_ms = self._ages_ms(now_ms)
        age_ms = ages_ms / self._num if self._num else 0.0
        num_ends = len(self._marks) - 1
        if not num_ends:
            return age_ms
        ended_ms, spent_ms = self._marks[0]
        took_ms = (self._ended_ms - ended_ms) / num_ends
        return max(took_ms, min(age_ms, (self._ended_ms + ages_ms - spent_ms) / num_ends))

    def _ages_ms(self, now_ms: int) -> int:
        return self._num * now_ms - self._begun_ms
