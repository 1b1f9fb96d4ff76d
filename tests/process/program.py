"""A program under test: its output as it comes, its processes, and the wait for their end."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import pytest

from disagg.cluster.processes import ProcessId, find_descendants, is_alive, read_process

ROOT = Path(__file__).parents[2]
BOUND_S = 240.0


class Program:
    """The program, its output as it comes, and its processes."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        cwd: Path,
        before: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Start it; ``before`` begins the command line, as a `Place` says."""
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", module, *arguments],
            cwd=cwd,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
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

    def wait_for(self, pattern: str, bound_s: float = BOUND_S) -> re.Match[str]:
        """First line from now on that matches; fails with what was said instead."""
        (found,) = self.wait_for_all([pattern], bound_s)
        return found

    def wait_for_all(
        self, patterns: Sequence[str], bound_s: float = BOUND_S
    ) -> list[re.Match[str]]:
        """Per pattern the first line from now on that matches, in whatever order they come."""
        missing = dict(enumerate(patterns))
        found: dict[int, re.Match[str]] = {}
        deadline = time.monotonic() + bound_s
        while time.monotonic() < deadline:
            try:
                line = self._queue.get(timeout=0.2)
            except Empty:
                if self.process.poll() is not None and self._queue.empty():
                    break
                continue
            self.lines.append(line)
            for index, pattern in list(missing.items()):
                if match := re.search(pattern, line):
                    found[index] = match
                    del missing[index]
            if not missing:
                return [found[index] for index in range(len(patterns))]
        absent = sorted(missing.values())
        pytest.fail(f"no {absent} in time; said: {self.lines}; exit: {self.process.poll()}")

    def end(self) -> None:
        """Kill it if it still runs, and wait for everything it started."""
        tree = self.tree()
        self.process.kill()
        self.process.wait(BOUND_S)
        wait_until_gone(tree)

    def tree(self) -> set[ProcessId]:
        return find_descendants({self.identity})


def wait_until_gone(processes: set[ProcessId]) -> None:
    deadline = time.monotonic() + BOUND_S
    while any(is_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [Path(f"/proc/{p.pid}/cmdline").read_text() for p in processes if is_alive(p)]
    assert left == []
