"""A worker that is not ready any more lets what goes on end, for a bounded time, then exits."""


class Draining:
    """Since when a worker is not ready, and whether it should exit.

    Args:
        drain_ms: how long what goes on may take to end.
    """

    def __init__(self, drain_ms: int) -> None:
        self._drain_ms = drain_ms
        self._until_ms: int | None = None

    def is_over(self, now_ms: int, *, ready: bool, idle: bool) -> bool:
        """Whether the worker should exit: it is not ready, and idle or out of time."""
        if ready:
            self._until_ms = None
            return False
        if self._until_ms is None:
            self._until_ms = now_ms + self._drain_ms
        return idle or now_ms >= self._until_ms
