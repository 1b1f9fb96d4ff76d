"""A process that is kept running."""

import time
from collections.abc import Callable

from disagg.cluster.back_off import BackOff
from disagg.cluster.child import Child

_RUNS_AFTER_S = 5.0
"""A process that has run for so long has begun."""
_FAILED_S = 1.0
"""After a start for which the system had nothing left."""


class Kept:
    """One process; it is started again when it ends, with growing delays.

    Attributes:
        child: the process, while there is one.
    """

    def __init__(self, name: str, command: list[str], report: Callable[[str], None]) -> None:
        self._name = name
        self._command = command
        self._report = report
        self._back_off = BackOff()
        self._start_at_s = 0.0
        self._began_s = 0.0
        self.child: Child | None = None

    def start(self) -> None:
        """Start it."""
        self.child = Child(self._name, self._command, None)
        self.began()

    def began(self) -> None:
        """Another process has taken the place; its time begins."""
        self._began_s = time.monotonic()

    def poll(self) -> int | None:
        """Start it again when it is time to; its exit code when it has just ended."""
        now_s = time.monotonic()
        if self.child is None:
            if now_s >= self._start_at_s:
                self._try_to_start(now_s)
            return None
        code = self.child.exit_code
        if code is None:
            if now_s - self._began_s >= _RUNS_AFTER_S:
                self._back_off.runs(now_s)
            return None
        delay_s = self._back_off.ended(now_s)
        self._report(f"{self._name} {self.child.end}; again in {delay_s:g} s")
        self.child, self._start_at_s = None, now_s + delay_s
        return code

    def _try_to_start(self, now_s: float) -> None:
        try:
            self.start()
        except OSError as error:  # no process, file or memory is left: for a while, mostly
            delay_s = max(_FAILED_S, self._back_off.ended(now_s))
            self._report(f"{self._name} cannot be started: {error}; again in {delay_s:g} s")
            self._start_at_s = now_s + delay_s

    def stop(self, timeout_s: float) -> None:
        """End it, if it runs; it may start again at once.

        Raises:
            ExpiredError: it had to be killed.
        """
        self._start_at_s = 0.0
        if self.child is not None:
            try:
                self.child.stop(timeout_s)
            finally:
                self.child = None

    def hurry(self) -> None:
        """Let it end at once; for a signal handler, while `stop` runs."""
        if self.child is not None:
            self.child.hurry()
