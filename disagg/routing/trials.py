"""Now and then one goes that would be shed, to see whether workers are as slow as they were."""

from disagg.routing.request import RoutedRequest

PAUSE_MS = 10_000
"""Between two of them; and for so long all are refused before the first one goes."""
PAUSE_TIMES = 10
"""The same, beside what is expected of one: all of them together take no more than a part."""
PAUSE_MAX_MS = 600_000


class Trials:
    """Says who goes although its first token is expected too late, even without any queue.

    Such requests are refused by what was measured. If all are, nothing is measured any more, and a
    fleet that was slow for a while, as when it had just started, would refuse them for ever. While
    those that go are in time the next ones go at once, and what they take is learned.
    """

    def __init__(self) -> None:
        self._due_ms: int | None = None
        """When the next one may go, whatever came of the last one; None: nobody was refused yet."""
        self._last: RoutedRequest | None = None

    def may_go(self, now_ms: int, request: RoutedRequest, expected_ms: float) -> bool:
        """Whether a request goes that would be refused.

        Args:
            now_ms: the time.
            request: has not waited for its whole bound yet.
            expected_ms: from now to its first token.
        """
        if request is self._last:
            return True  # it found no room, and is planned again
        if self._due_ms is None:
            self._due_ms = now_ms + PAUSE_MS
        waited_ms = max(0, now_ms - request.received_ms)
        likely_ms = waited_ms + expected_ms * self._taken_share(now_ms)
        if now_ms < self._due_ms and request.slo.is_missed(likely_ms):
            return False
        self._last = request
        self._due_ms = now_ms + int(min(PAUSE_MAX_MS, max(PAUSE_MS, PAUSE_TIMES * expected_ms)))
        return True

    def _taken_share(self, now_ms: int) -> float:
        """Of what was expected of the last one, what it took; 1 where that is not known, or old."""
        last = self._last
        if last is None or last.first_token_ms is None:
            return 1.0
        first = last.generations[0]
        if first.estimate is None or now_ms - last.first_token_ms > PAUSE_MS:
            return 1.0
        return (last.first_token_ms - first.started_ms) / max(1.0, first.estimate.ttft_ms)
