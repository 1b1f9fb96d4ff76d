"""Calls of Ray's library that do not come back."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from disagg.cluster import ray_watch
from disagg.cluster.processes import ProcessId, read_process
from disagg.cluster.ray_watch import NO_CLUSTER_EXIT_CODE, RayWatch

WAIT_S = 30.0


class Given:
    """What a watch has said."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.heard = threading.Event()

    def up(self, reason: str) -> None:
        self.reasons.append(reason)
        self.heard.set()


@pytest.fixture
def part() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def identity(pid: int) -> ProcessId:
    found = read_process(pid)
    assert found is not None
    return found[0]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "_POLL_S", 0.05)


def test_a_call_that_takes_too_long_is_given_up() -> None:
    given = Given()
    watch = RayWatch(given.up)
    with watch.calls(0.1, "it does not start"):
        assert given.heard.wait(WAIT_S)
    assert given.reasons == ["it does not start"]


def test_calls_are_given_up_once_a_part_of_ray_has_ended(part: subprocess.Popen[bytes]) -> None:
    given = Given()
    parts = {identity(os.getpid()): "gcs_server", identity(part.pid): "raylet"}
    watch = RayWatch(given.up, lambda: parts)
    with watch.calls(patience_s=0.1):
        assert not given.heard.wait(0.5), "control: both run"
        part.kill()
        assert given.heard.wait(WAIT_S)
    assert given.reasons == ["Ray's raylet has ended, and its library waits for it"]


def test_only_calls_that_do_not_come_back_are(part: subprocess.Popen[bytes]) -> None:
    given = Given()
    parts = {identity(part.pid): "raylet"}
    watch = RayWatch(given.up, lambda: parts)
    part.kill()
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s:  # as of who looks again and again
        with watch.calls(1.0, patience_s=1.0):
            time.sleep(0.2)
    assert not given.heard.wait(1.5), "nothing is called"
    watch.end()
    with watch.calls(0.1, "late"):
        assert not given.heard.wait(0.5)


BESIDE_A_CLUSTER = """
import sys, time
from disagg.cluster import ray_watch as module

class Clock:  # a process that was stopped finds another time when it goes on
    stood_s = 0.0
    sleep = staticmethod(time.sleep)
    def monotonic(self):
        return time.monotonic() + self.stood_s

clock = module.time = Clock()
how = sys.argv[1]
watch = module.RayWatch()
with watch.calls(60.0 if how == "stands" else 3.0, "Ray does not answer"):
    if how == "stands":
        clock.stood_s = 600.0
        time.sleep(2)  # it has looked
    for _ in range(80 if how == "sees" else 0):
        watch.see()
        time.sleep(0.05)
    if how == "waits":
        time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "code"), [("waits", NO_CLUSTER_EXIT_CODE), ("sees", 0), ("stands", 0)]
)
def test_silence_ends_a_process_beside_a_cluster_and_signs_of_life_keep_it(
    how: str, code: int
) -> None:
    """One that stood still itself has seen nothing, and goes on."""
    command = [sys.executable, "-c", BESIDE_A_CLUSTER, how]
    run = subprocess.run(command, timeout=300, check=False, capture_output=True, text=True)
    assert run.returncode == code
    assert ("Ray does not answer, this process ends" in run.stderr) is bool(code)
