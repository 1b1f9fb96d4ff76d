"""Namespaces of this machine that live as long as the test that made them, and no longer."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from disagg.cluster.processes import ProcessId, find_children, is_alive, read_process

BOUND_S = 60.0
MARK = re.compile(r"DISAGG_HOSTS_OF=(\d+)-(\d+)")
"""On the command line: which process they belong to."""


class UnavailableError(Exception):
    """Namespaces, or what lies in them, cannot be made here."""


class Namespaces:
    """Network, files and processes apart from the machine's, and their first process.

    Everything in them ends with the first process. That ends when its standard input is closed, so
    also when this process is killed.

    Attributes:
        pid: the first process, by the machine's number.
    """

    def __init__(self, program: Sequence[str]) -> None:
        """Start the program as the first process; return when it has said `ready`.

        Raises:
            UnavailableError: it ended before.
        """
        me = read_process(os.getpid())
        assert me is not None
        mark = f"DISAGG_HOSTS_OF={me[0].pid}-{me[0].started_ticks}"
        apart = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc")
        self._process = subprocess.Popen(
            ["unshare", *apart, "--kill-child", "env", mark, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            _, complained = self._process.communicate(timeout=BOUND_S)
            raise UnavailableError(f"{shlex.join(program)}: {complained.strip()}")
        (first,) = find_children(self._process.pid)
        self.pid = first.pid
        self._of_processes = os.readlink(f"/proc/{self.pid}/ns/pid")

    @property
    def network(self) -> list[str]:
        """What the command line of a command begins with that runs in this network."""
        return ["nsenter", f"--target={self.pid}", "--net"]

    @property
    def all(self) -> list[str]:
        """What the command line of a command begins with that runs here in every respect."""
        return [*self.network, "--mount", "--pid", "--uts", "--ipc"]

    @property
    def processes(self) -> set[ProcessId]:
        """All that run here."""
        return processes_in(self._of_processes)

    def end(self) -> None:
        """Kill the first process; return when all are gone. Harmless when they are."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        self._process.communicate(timeout=BOUND_S)


def processes_in(namespace: str) -> set[ProcessId]:
    """All processes of a namespace, by the link that names it."""
    found: set[ProcessId] = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # it ended in between
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == namespace:
                process = read_process(int(name))
                if process is not None and is_alive(process[0]):
                    found.add(process[0])
    return found


def find_stale() -> set[ProcessId]:
    """What holds namespaces of processes that have ended; killing it ends them."""
    found: set[ProcessId] = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if not name.isdigit():
                continue
            words = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace").split("\0")
            marks = [mark for word in words[:20] if (mark := MARK.fullmatch(word))]
            process = read_process(int(name))
            if words[0] != "unshare" or not marks or process is None:
                continue
            if not is_alive(ProcessId(int(marks[0][1]), int(marks[0][2]))):
                found.add(process[0])
    return found


def end_stale() -> None:
    """End what processes that have ended left behind."""
    for process in find_stale():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def do(*command: str) -> None:
    """Run a command of the machine.

    Raises:
        UnavailableError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    if done.returncode:
        raise UnavailableError(f"{shlex.join(command)}: {done.stderr.strip()}")
