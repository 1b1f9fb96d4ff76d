"""Calls of Ray's library that do not come back."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from disagg.cluster.processes import ProcessId, read_process
from disagg.cluster.ray_watch import RayWatch

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


def test_a_call_that_takes_too_long_is_given_up() -> None:
    given = Given()
    watch = RayWatch(given.up)
    with watch.calls(0.1, "it does not start"):
        assert given.heard.wait(WAIT_S)
    assert given.reasons == ["it does not start"]


def test_calls_are_given_up_once_a_part_of_ray_has_ended(part: subprocess.Popen[bytes]) -> None:
    given = Given()
    watch = RayWatch(given.up, patience_s=0.1)
    watch.watch({identity(os.getpid()): "gcs_server", identity(part.pid): "raylet"})
    with watch.calls():
        assert not given.heard.wait(2.0), "control: both run"
        part.kill()
        assert given.heard.wait(WAIT_S)
    assert given.reasons == ["Ray's raylet has ended, and its library waits for it"]


def test_only_calls_that_do_not_come_back_are(part: subprocess.Popen[bytes]) -> None:
    given = Given()
    watch = RayWatch(given.up, patience_s=1.0)
    watch.watch({identity(part.pid): "raylet"})
    part.kill()
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:  # as of who looks again and again
        with watch.calls(1.0):
            time.sleep(0.2)
    assert not given.heard.wait(2.0), "nothing is called"
    watch.end()
    with watch.calls(0.1, "late"):
        assert not given.heard.wait(1.5)
