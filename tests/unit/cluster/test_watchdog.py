"""The process ends when nothing is seen for a while, and not before."""

import subprocess
import sys

RUN = """
import sys, time
from disagg.cluster import watchdog as module
from disagg.cluster.watchdog import Watchdog

class Clock:  # a process that was stopped finds another time when it goes on
    stood_s = 0.0
    sleep = staticmethod(time.sleep)
    def monotonic(self):
        return time.monotonic() + self.stood_s

clock = module.time = Clock()
if sys.argv[1] == "stands":
    watchdog = Watchdog(60.0, 69)
    clock.stood_s = 600.0
    time.sleep(2)  # it has looked
    sys.exit(0)
watchdog = Watchdog(3.0, 69)
if sys.argv[1] == "sees":
    for _ in range(80):
        watchdog.see()
        time.sleep(0.05)
    sys.exit(0)
time.sleep(600)
"""


def run(how: str) -> int:
    return subprocess.run([sys.executable, "-c", RUN, how], timeout=300, check=False).returncode


def test_silence_ends_the_process() -> None:
    assert run("waits") == 69


def test_signs_of_life_keep_it() -> None:
    assert run("sees") == 0


def test_a_process_that_stood_still_has_seen_nothing_and_goes_on() -> None:
    assert run("stands") == 0
