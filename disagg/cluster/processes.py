"""Processes of this machine by /proc: who descends from whom, and ending those we started."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process for certain: a pid alone is reused."""

    pid: int
    started_ticks: int


def read_process(pid: int) -> tuple[ProcessId, int, str] | None:
    """Identity, parent and state letter of a process; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessId(pid, int(fields[19])), int(fields[1]), fields[0]


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still runs; one that only waits to be reaped does not."""
    found = read_process(process.pid)
    return found is not None and found[0] == process and found[2] not in "ZX"


def find_children(pid: int) -> set[ProcessId]:
    """Process ids of the direct children of a process."""
    return {process for process, parent in _all() if parent == pid}


def named(processes: Collection[ProcessId], names: Collection[str]) -> dict[ProcessId, str]:
    """Those of the processes whose programs have these names, of 15 characters at most."""
    found = {}
    for process in processes:
        with contextlib.suppress(OSError):  # it has gone
            name = Path(f"/proc/{process.pid}/comm").read_text().rstrip("\n")
            if name in names:
                found[process] = name
    return found


def find_descendants(roots: Collection[ProcessId]) -> set[ProcessId]:
    """The given processes that run, and all that descend from them."""
    children: dict[int, list[ProcessId]] = {}
    for process, parent in _all():
        children.setdefault(parent, []).append(process)
    found = {process for process in roots if is_alive(process)}
    rest = list(found)
    while rest:
        for child in children.get(rest.pop().pid, ()):
            if child not in found:
                found.add(child)
                rest.append(child)
    return found


def end_processes(processes: Collection[ProcessId], timeout_s: float) -> set[ProcessId]:
    """Wait until all are gone, killing what is left after half the time.

    Returns:
        Those that had to be killed.
    """
    half = time.monotonic() + timeout_s / 2
    alive = {process for process in processes if is_alive(process)}
    while alive and time.monotonic() < half:
        time.sleep(_POLL_S)
        alive = {process for process in alive if is_alive(process)}
    killed = set(alive)
    for process in killed:
        if is_alive(process):
            os.kill(process.pid, signal.SIGKILL)
    while any(is_alive(process) for process in killed) and time.monotonic() < half + timeout_s / 2:
        time.sleep(_POLL_S)
    return killed


def adopt_orphans() -> None:
    """Let descendants whose parents end become children of this process, not of init.

    Else what Ray's raylet has started is no descendant any more once that has ended, and nobody
    knows that it is ours to end.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(own: Collection[int]) -> None:
    """Let adopted processes that have ended go: each counts where processes are limited.

    Args:
        own: children whose exit codes somebody here waits for.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return  # there are no children
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, 0)


def exit_code(child: ProcessId) -> int | None:
    """Of a child that has ended, below 0 the signal that ended it; None where nobody knows.

    Whoever started it can still ask for it.
    """
    try:
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None  # somebody has asked
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def end_with_parent(parent: int) -> None:
    """Let this process end when the one that started it is gone, however and whenever it went.

    Args:
        parent: its process id, by its own word: a start takes seconds, in which it may have gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _all() -> list[tuple[ProcessId, int]]:
    entries = [read_process(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return [(entry[0], entry[1]) for entry in entries if entry is not None]
