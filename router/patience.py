"""How long a peer that sends or reads slowly is waited for."""


class Patience:
    """A bound on standing still, and on the average rate; each byte renews it.

    Whoever keeps at least the rate is never cut off, however much there is; whoever moves a byte
    now and then to stay connected is.

    Args:
        now_s: the start, of any clock that does not go back.
        timeout_s: without a byte for so long it ends; also the grace before the rate counts.
        bytes_per_s_min: on average since the start; 0: any.
    """

    def __init__(self, now_s: float, timeout_s: float, bytes_per_s_min: int) -> None:
        self._start_s = self._moved_s = now_s
        self._timeout_s = timeout_s
        self._bytes_per_s_min = bytes_per_s_min
        self._num_bytes = 0

    def moved(self, now_s: float, num_bytes: int) -> None:
        """Count bytes; none change nothing."""
        if num_bytes:
            self._moved_s = now_s
            self._num_bytes += num_bytes

    def left_s(self, now_s: float) -> float:
        """Seconds to wait for the next byte; at most 0 when it is too late."""
        end_s = self._moved_s + self._timeout_s
        if self._bytes_per_s_min:
            due_s = self._num_bytes / self._bytes_per_s_min
            end_s = min(end_s, self._start_s + self._timeout_s + due_s)
        return end_s - now_s
