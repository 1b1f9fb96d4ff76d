"""What came lately, as far as plans leave room for what will come."""

from collections import deque

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

    def shorter_per_ms(self, now_ms: int, compute_ms: float, slo_ttft_ms: int) -> float:
        """Requests per ms that compute less than one that takes ``compute_ms``.

        Each counts as often as its bound is tighter than ``slo_ttft_ms``, once where either has
        none: a wait that is nothing to a patient request makes a hurried one come too late.
        """
        if len(self._last) < ARRIVALS_MIN:
            return 0.0
        most_ms = SHORTER * compute_ms
        shorter = (one for one in self._last if one.compute_ms < most_ms)
        span_ms = max(SPAN_MS_MIN, now_ms - self._last[0].at_ms)
        return sum(_urgency(one, slo_ttft_ms) for one in shorter) / span_ms


def _urgency(newcomer: _Arrival, slo_ttft_ms: int) -> float:
    if not newcomer.slo_ttft_ms or not slo_ttft_ms:
        return 1.0
    return min(URGENCY_MAX, slo_ttft_ms / newcomer.slo_ttft_ms)
