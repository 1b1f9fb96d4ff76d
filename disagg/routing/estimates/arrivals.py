"""What came lately, as far as plans leave room for what will come."""

from bisect import bisect_left
from collections import deque
from itertools import accumulate

from disagg.messages.frozen import dataclass

ARRIVALS_MAX = 64
ARRIVALS_MIN = 8
"""Fewer say nothing of a rate."""
SPAN_MS_MIN = 1_000
"""What came at once is not what will come each millisecond."""
SHORTER = 0.5
"""A request that computes less than this share of another is shorter than it: to delay the longer
one saves more than it costs only if they differ by much."""
URGENCY_MAX = 16.0
"""Times that a millisecond may count for a bound that is tighter; clients choose their bounds."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    at_ms: int
    compute_ms: float
    slo_ttft_ms: int


@dataclass(frozen=True, slots=True)
class Newcomers:
    """Who is to come, by what their prompts take."""

    compute_ms: tuple[float, ...]
    """In ascending order."""
    num_before: tuple[float, ...]
    """So many of them before each, and after the last one."""
    span_ms: int
    """In which they come."""

    def shorter_per_ms(self, compute_ms: float) -> float:
        """Of them per ms, who computes less than a request that takes so long."""
        return self.num_before[bisect_left(self.compute_ms, SHORTER * compute_ms)] / self.span_ms


NO_NEWCOMERS = Newcomers((), (0.0,), SPAN_MS_MIN)


class Arrivals:
    """The last requests that went to workers: when, what they computed, and by when."""

    def __init__(self) -> None:
        self._last: deque[_Arrival] = deque(maxlen=ARRIVALS_MAX)

    def add(self, now_ms: int, compute_ms: float, slo_ttft_ms: int) -> None:
        """A request goes to its workers, for the first time.

        Args:
            now_ms: the time.
            compute_ms: what its prompt takes there.
            slo_ttft_ms: the bound for its first token; 0: none.
        """
        self._last.append(_Arrival(now_ms, compute_ms, slo_ttft_ms))

    def newcomers(self, now_ms: int, slo_ttft_ms: int) -> Newcomers:
        """Who is to come after a request, as who came lately.

        Args:
            now_ms: the time.
            slo_ttft_ms: the request's bound. Each newcomer counts as often as its own one is
                tighter, once where either has none: a wait that is nothing to a patient request
                makes a hurried one come too late.
        """
        if len(self._last) < ARRIVALS_MIN:
            return NO_NEWCOMERS
        ordered = sorted((one.compute_ms, _urgency(one, slo_ttft_ms)) for one in self._last)
        counts = accumulate((count for _, count in ordered), initial=0.0)
        span_ms = max(SPAN_MS_MIN, now_ms - self._last[0].at_ms)
        return Newcomers(tuple(ms for ms, _ in ordered), tuple(counts), span_ms)


def _urgency(newcomer: _Arrival, slo_ttft_ms: int) -> float:
    if not newcomer.slo_ttft_ms or not slo_ttft_ms:
        return 1.0
    return min(URGENCY_MAX, slo_ttft_ms / newcomer.slo_ttft_ms)
