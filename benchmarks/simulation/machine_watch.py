"""How much of this machine others take: what they disturb says nothing of a model without them."""

import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PERIOD_S = 0.05
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NUM_CORES = os.cpu_count() or 1


def busy_s() -> float:
    """CPU seconds of everybody on this machine since its start, those stolen from it included."""
    names = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, names[:8])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


@dataclass(slots=True)
class MachineWatch:
    """Looks at the machine's CPU time and at ours, from `__enter__` on until `__exit__`.

    Args:
        ours_s: CPU seconds of the processes that belong to the measurement, so far.
    """

    ours_s: Callable[[], float]
    _moments_s: list[float] = field(default_factory=list)
    _others_s: list[float] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> "MachineWatch":
        self._look()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def others_share(self, begin_s: float, end_s: float) -> float:
        """Part of all cores' time that others took between two moments of the monotonic clock."""
        first = max(0, bisect_right(self._moments_s, begin_s) - 1)
        last = min(len(self._moments_s) - 1, bisect_left(self._moments_s, end_s))
        lasted_s = self._moments_s[last] - self._moments_s[first]
        if not lasted_s:
            return 0.0
        return max(0.0, self._others_s[last] - self._others_s[first]) / lasted_s / NUM_CORES

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self._look()

    def _look(self) -> None:
        others_s = busy_s() - self.ours_s()
        self._others_s.append(others_s)
        self._moments_s.append(time.monotonic())  # last: somebody may ask meanwhile


def wait_for_quiet(share_max: float, timeout_s: float) -> bool:
    """Wait until others take no more than a share of the machine for two seconds; False: too late.

    Only while nothing of ours runs.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        before_s, began_s = busy_s(), time.monotonic()
        time.sleep(2.0)
        if (busy_s() - before_s) / (time.monotonic() - began_s) / NUM_CORES <= share_max:
            return True
        if time.monotonic() > deadline_s:
            return False
