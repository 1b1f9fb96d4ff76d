"""Ends this process when Ray does not come back: without a head some calls wait for ever."""

import logging
import os
import threading
import time

NO_CLUSTER_EXIT_CODE = 69
"""Of a supervisor that has waited for the Ray cluster in vain."""

log = logging.getLogger(__name__)

_POLL_S = 0.5


class Watchdog:
    """A thread that ends the process if nothing was seen for so long.

    Attributes:
        exit_code: of the process, then.
    """

    def __init__(self, timeout_s: float, exit_code: int) -> None:
        self.exit_code = exit_code
        self._timeout_s = timeout_s
        self._seen_s = time.monotonic()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def see(self) -> None:
        """Something went on."""
        self._seen_s = time.monotonic()

    def _run(self) -> None:
        while time.monotonic() - self._seen_s < self._timeout_s:
            time.sleep(_POLL_S)
        log.error("Ray does not answer for %g s, this process ends", self._timeout_s)
        logging.shutdown()
        os._exit(self.exit_code)
