"""Ends the workers of this host, or of this container, by what the kernel shows: without Ray."""

import contextlib
import os
import signal
import time
from pathlib import Path

from disagg.cluster.processes import ProcessId, is_alive, read_process
from disagg.workers.actor import WorkerActor

_TITLE = f"ray::{WorkerActor.__name__}"
"""How Ray names the process of a worker's actor."""
_POLL_S = 0.1


def find_workers_here() -> set[ProcessId]:
    """Every worker's process that is seen from here: in a pod those of its container."""
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
            process = read_process(int(name)) if title.startswith(_TITLE) else None
            if process is not None and is_alive(process[0]):
                found.add(process[0])
    return found


def end_workers_here(timeout_s: float) -> set[ProcessId]:
    """Ask every worker of this host once to drain, and wait for their ends.

    Ray's head is not asked: it may have gone. Workers that start meanwhile are not waited for.

    Returns:
        Those that still run after ``timeout_s``.
    """
    workers = find_workers_here()
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGTERM)  # once: a second signal ends it without a drain
    deadline = time.monotonic() + timeout_s
    while (left := {one for one in workers if is_alive(one)}) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left
