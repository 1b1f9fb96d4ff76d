"""A router that is kept running is ended when it stands still."""

import signal
import sys
from collections.abc import Iterator

import pytest

from disagg.cluster import kept_router
from disagg.cluster.kept_router import KeptRouter
from disagg.cluster.own_settings import decide_ports
from disagg.config import Settings
from disagg.router.inherited import SERVING
from tests.process.harness import wait_until

BEATS_WHEN_TOLD = """
import os, signal, sys
tells = int(sys.argv[-1].split(",")[2])
signal.signal(signal.SIGUSR1, lambda *_: os.write(tells, b"."))
os.write(tells, b"bound\\nserving\\n")
while True:
    signal.pause()
"""


class Clock:
    """Stands in for the module `time`."""

    now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s


class Kept:
    """A router's keeper with a clock of the test, and what it reports."""

    def __init__(self, clock: Clock) -> None:
        ports = {"http_port": 0, "grpc_port": 0, "admin_port": 0}
        settings = decide_ports(Settings.model_validate({"router": ports}))
        command = [sys.executable, "-c", BEATS_WHEN_TOLD]
        self.reports: list[str] = []
        self.clock = clock
        self.router = KeptRouter(command, settings, self.reports.append)
        self.router.start()
        wait_until(self._serves, "it to serve")

    @property
    def pid(self) -> int | None:
        return self.router.child.pid if self.router.child is not None else None

    def look(self, num: int, apart_s: float = 1.0) -> None:
        for _ in range(num):
            self.clock.now_s += apart_s
            self.router.poll()

    def beat(self) -> None:
        assert self.router.child is not None
        self.router.child.signal(signal.SIGUSR1)
        wait_until(self._heard, "the beat to be heard")

    def _serves(self) -> bool:
        self.router.poll()
        return SERVING in self.router._said  # who keeps several asks only one whether it serves

    def _heard(self) -> bool:
        self.router.poll()
        return self.router._still_s == 0.0

    def is_another(self, pid: int | None) -> bool:
        self.router.poll()
        return self.pid not in (None, pid)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    clock = Clock()
    monkeypatch.setattr(kept_router, "time", clock)
    kept = Kept(clock)
    try:
        yield kept
    finally:
        kept.router.stop(60.0)


def test_one_that_stands_still_is_ended_and_started_again(kept: Kept) -> None:
    pid = kept.pid
    kept.look(3)
    kept.beat()
    kept.look(int(kept_router._STILL_S))
    assert not kept.reports, "it may be slow"
    kept.look(2)
    assert [line for line in kept.reports if "stands still" in line]
    wait_until(lambda: kept.is_another(pid), "another one")


def test_one_that_no_other_could_replace_is_looked_at_as_before(kept: Kept) -> None:
    pid, command = kept.pid, kept.router._command
    kept.router._command = [sys.executable, "-c", ""]
    kept.router.replace()
    kept.router._command = command
    assert kept.pid == pid
    kept.look(int(kept_router._STILL_S) + 2)
    assert [line for line in kept.reports if "stands still" in line]


def test_one_whose_loop_runs_is_left_alone(kept: Kept) -> None:
    pid = kept.pid
    for _ in range(5):
        kept.look(int(kept_router._STILL_S) // 2)
        kept.beat()
    assert (kept.pid, kept.reports) == (pid, [])


def test_time_in_which_the_keeper_stood_still_counts_for_little(kept: Kept) -> None:
    pid = kept.pid
    kept.beat()
    kept.look(10, apart_s=3_600.0)
    assert (kept.pid, kept.reports) == (pid, [])
