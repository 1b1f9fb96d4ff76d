"""Ends this process when Ray does not come back: without a head some calls wait for ever."""

import logging
import os
import threading
import time

NO_CLUSTER_EXIT_CODE = 69
"""Of a supervisor that has waited for the Ray cluster in vain."""

log = logging.getLogger(__name__)

_POLL_S = 0.5
_LOOK_S = 2.0
"""Between two looks so much time counts at most: this process may have stood still itself."""


class Watchdog:
    """A thread that ends the process if nothing was seen for so long, in the time in which it ran.

    Attributes:
        exit_code: of the process, then.
    """

    def __init__(self, timeout_s: float, exit_code: int) -> None:
        self.exit_code = exit_code
        self._timeout_s = timeout_s
        self._ran_s = self._seen_s = 0.0
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def see(self) -> None:
        """Something went on."""
        self._seen_s = self._ran_s

    def _run(self) -> None:
        looked_s = time.monotonic()
        while self._ran_s - self._seen_s < self._timeout_s:
            time.sleep(_POLL_S)
            now_s = time.monotonic()
            self._ran_s += min(now_s - looked_s, _LOOK_S)
            looked_s = now_s
        log.error("Ray does not answer for %g s, this process ends", self._timeout_s)
        logging.shutdown()
        os._exit(self.exit_code)
