"""The process ends when nothing is seen for a while, and not before."""

import subprocess
import sys

RUN = """
import sys, time
from disagg.cluster.watchdog import Watchdog
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
