"""What a router was told last of a worker's load, and when it has to hear of it again."""

from disagg.messages.stats import WorkerStats

BEAT_MS = 250
"""A router that waits for something at a worker hears at least so often, also without a change."""


class ToldStats:
    """Of one router."""

    def __init__(self) -> None:
        self._told: WorkerStats | None = None
        """None: it gets the next ones in any case."""
        self._told_ms = 0.0

    def tell_again(self) -> None:
        """It has to have the next ones even if they are the same.

        It counts as load what it submitted since the last ones it got: a short request would count
        for ever.
        """
        self._told = None

    def knows(self, stats: WorkerStats) -> bool:
        """Whether it was told these."""
        return self._told == stats

    def is_due(self, now_ms: float, stats: WorkerStats, *, loaded: bool, pace_ms: int = 0) -> bool:
        """Whether it has to have these; it is told if so.

        Args:
            now_ms: the time.
            stats: as they are now.
            loaded: something goes on at the worker: even the same are sent every `BEAT_MS`.
            pace_ms: so long after the last ones others are sent, if they are not urgent.
        """
        since_ms = now_ms - self._told_ms
        changed = self._told != stats and since_ms >= pace_ms
        beats = loaded and since_ms >= max(BEAT_MS, pace_ms)
        if not (changed or beats or _is_urgent(self._told, stats)):
            return False
        self._told, self._told_ms = stats, now_ms
        return True


def _is_urgent(told: WorkerStats | None, stats: WorkerStats) -> bool:
    """Whether a router has to know now: it is waiting for stats, or may plan what is refused."""
    if told is None:
        return True
    return (told.ready, told.draining, told.stalled) != (stats.ready, stats.draining, stats.stalled)
