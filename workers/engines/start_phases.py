"""The phases of an engine's start in the log: time, memory, and progress of the long ones."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from disagg.kv.shapes.memory_plan import format_memory
from disagg.workers import machine

log = logging.getLogger(__name__)

PROGRESS_S = 5.0


@contextmanager
def phase(
    name: str, device: str, *, expected_bytes: int = 0, progress_s: float = PROGRESS_S
) -> Iterator[None]:
    """Log what a phase took, and while it goes on how far it is.

    Args:
        name: of the phase.
        device: whose memory it takes; that of the process on the CPU.
        expected_bytes: what it will take; 0 if nobody knows.
        progress_s: between two lines of progress.
    """
    start_s, before = time.monotonic(), machine.used_bytes(device)
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(progress_s):
            taken = format_memory(max(0, machine.used_bytes(device) - before))
            of = f" of about {format_memory(expected_bytes)}" if expected_bytes else ""
            log.info("%s: %s%s after %.0f s", name, taken, of, time.monotonic() - start_s)

    reporter = threading.Thread(target=report, name="progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()
    now = machine.used_bytes(device)
    log.info(
        "%s: %.1f s, %s (%s in use)",
        name,
        time.monotonic() - start_s,
        format_memory(max(0, now - before)),
        format_memory(now),
    )
