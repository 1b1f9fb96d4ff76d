"""What happened at a tier, counted by name from several threads."""

import logging
import threading
from collections import Counter

log = logging.getLogger(__name__)


class Counts:
    """Named counters; those of mishaps are logged the 1st, 2nd, 4th, 8th ... time.

    Args:
        tier: whose, for the log.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._mutex = threading.Lock()
        self._numbers: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> int:
        """Count something; returns how often it has happened by now."""
        with self._mutex:
            self._numbers[name] += number
            return self._numbers[name]

    def mishap(self, name: str, what: object) -> None:
        """Count something that should not happen, and say so in the log, ever more rarely."""
        times = self.add(name)
        if times & (times - 1) == 0:
            # Of an error of obstore's its insides follow.
            first = next(iter(str(what).splitlines()), repr(what))
            log.warning("tier %s: %s: %s (%d times)", self._tier, name, first, times)

    def as_dict(self) -> dict[str, int]:
        """All counters that are not 0."""
        with self._mutex:
            return dict(self._numbers)
