"""What is said of processes that end without a word: children, and workers that Ray has lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ray.exceptions import RayError

from disagg.cluster.child import MEMORY, Child, how_it_ended
from disagg.cluster.supervised import why_ended
from disagg.errors import ConfigError

SLEEPS = [sys.executable, "-c", "import time; print('began', flush=True); time.sleep(60)"]


def ended_by(number: signal.Signals, log: Path, *, here: bool) -> str:
    """What its end is told with."""
    child = Child("router", SLEEPS, log)
    if here:
        child.signal(number)
    else:
        os.kill(child.pid, number)
    child._process.wait(60)
    with pytest.raises(ConfigError) as told:
        child.check()
    return told.value.message.splitlines()[0]


def test_a_kill_by_somebody_else_is_named_with_its_likely_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert ended_by(signal.SIGKILL, log, here=False) == f"router was killed (signal 9): {MEMORY}:"
    assert ended_by(signal.SIGKILL, log, here=True) == "router was killed (signal 9):"  # control
    said = "router was ended by SIGSEGV, signal 11:"
    assert ended_by(signal.SIGSEGV, log, here=False) == said


def test_an_exit_code_is_one() -> None:
    done = subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], timeout=60)
    assert how_it_ended(done.returncode) == "ended with exit code 3"
    assert how_it_ended(-50) == "was ended by signal 50"


RAY = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker "
    "exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some "
    "common causes include: (1) the process was killed by the OOM killer, (2) ray stop --force"
)


def test_of_a_worker_that_ray_has_lost_its_log_and_the_kernel_are_named() -> None:
    said = why_ended(RayError(f"ip: 127.0.0.1\n{RAY}"), 9165)
    assert said.startswith("its process 9165 has ended; ")
    assert "logs/worker-*-9165.err" in said
    assert said.endswith(MEMORY)
    assert "ray stop" not in said
    assert why_ended(RayError(RAY), None).startswith("its process has ended; ")
    assert why_ended(RayError("the node has gone"), 9165) == "the node has gone"


def test_of_one_that_ended_while_it_was_made_the_reason_is_told() -> None:
    never = "The actor never ran - it was cancelled before it started running."
    assert why_ended(RayError(f"{RAY}\n{never}"), None).startswith("its process has ended; ")
    assert why_ended(RayError(f"no room\n{never}"), None) == "no room"
