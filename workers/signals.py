"""Signals of a worker's process: the first one lets it drain, the second one ends it."""

import logging
import math
import os
import signal
import threading
import time
from types import FrameType
from typing import Protocol

log = logging.getLogger(__name__)

FORCED_EXIT_CODE = 130
SIGNALS_S = 0.2
"""A main thread that waits looks for signals so often."""


class Drains(Protocol):
    """A worker, as far as signals concern it."""

    def drain(self) -> None:
        """Take no new work, let what goes on end, then stop."""


def drain_on_signals(worker: Drains) -> None:
    """Let SIGTERM and SIGINT drain the worker, and a second one of them end the process at once.

    Only a main thread can receive signals: elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        log.warning("not the main thread: SIGTERM ends this worker without draining it")
        return
    asked = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            log.warning("second signal: forced exit")
            logging.shutdown()
            os._exit(FORCED_EXIT_CODE)
        asked.set()
        worker.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def wait_and_handle_signals(event: threading.Event, timeout_s: float | None = None) -> bool:
    """Block until the event is set; False when the time is over first.

    In a main thread handlers of signals run meanwhile. Waiting without end would not let them:
    Python leaves them to the main thread, and the kernel may wake any other one for a signal.
    """
    until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not event.wait(min(SIGNALS_S, max(0.0, until_s - time.monotonic()))):
        if time.monotonic() >= until_s:
            return False
    return True
