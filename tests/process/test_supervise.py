"""Ray starts, restarts and ends the actors' processes; the workers in them are stand-ins."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import pytest

from disagg.cluster.processes import ProcessId, find_descendants, is_alive, read_process

ROOT = Path(__file__).parents[2]
BOUND_S = 90.0

pytestmark = pytest.mark.cluster


class Run:
    """The program, its output as it comes, and its processes."""

    def __init__(self, model_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.supervised_run", str(model_dir)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        found = read_process(self.process.pid)
        assert found is not None
        self.identity = found[0]
        self.lines: list[str] = []
        self._queue: Queue[str] = Queue()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """First line from now on that matches; fails with what was said instead."""
        deadline = time.monotonic() + BOUND_S
        while time.monotonic() < deadline:
            try:
                line = self._queue.get(timeout=0.2)
            except Empty:
                if self.process.poll() is not None and self._queue.empty():
                    break
                continue
            self.lines.append(line)
            found = re.search(pattern, line)
            if found:
                return found
        pytest.fail(f"no {pattern!r} in time; said: {self.lines}; exit: {self.process.poll()}")

    def tree(self) -> set[ProcessId]:
        return find_descendants({self.identity})


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def run(model_dir: Path) -> Iterator[Run]:
    started = Run(model_dir)
    yield started
    tree = started.tree()
    started.process.kill()
    started.process.communicate(timeout=BOUND_S)
    wait_until_gone(tree)


def wait_until_gone(processes: set[ProcessId]) -> None:
    deadline = time.monotonic() + BOUND_S
    while any(is_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [Path(f"/proc/{p.pid}/cmdline").read_text() for p in processes if is_alive(p)]
    assert left == []


SERVES = r"worker {} serves{} on \S+ \(pid (\d+), epoch (\w+)\)"


def test_a_dead_process_is_a_new_epoch_and_nothing_is_left(run: Run, model_dir: Path) -> None:
    first = run.wait_for(SERVES.format("prefill-0", ""))
    other = run.wait_for(SERVES.format("decode-0", ""))
    run.wait_for("all serve")
    assert first[1] != other[1]

    os.kill(int(first[1]), signal.SIGKILL)
    again = run.wait_for(SERVES.format("prefill-0", " again"))
    assert again[1] != first[1]
    assert again[2] != first[2]

    (model_dir / "fail-decode-0").touch()  # the worker inside fails, its process must follow
    other_again = run.wait_for(SERVES.format("decode-0", " again"))
    assert other_again[1] != other[1]
    assert other_again[2] != other[2]

    tree = run.tree()
    assert {int(again[1]), int(other_again[1])} <= {process.pid for process in tree}
    run.process.communicate(timeout=BOUND_S)  # ends standard input
    assert run.process.returncode == 0
    wait_until_gone(tree)


def test_a_killed_driver_leaves_no_process(run: Run) -> None:
    run.wait_for("all serve")
    tree = run.tree()
    assert len(tree) > 3
    run.process.kill()
    wait_until_gone(tree)


def test_a_refused_checkpoint_is_one_sentence(model_dir: Path) -> None:
    (model_dir / "refuse-decode-0").touch()
    run = Run(model_dir)
    run.wait_for(r"^ConfigError: worker decode-0: model\.dir: this checkpoint is not to my taste$")
    assert run.process.wait(BOUND_S) == 2
