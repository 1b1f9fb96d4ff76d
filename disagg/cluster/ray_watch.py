"""Notices calls of Ray's library that do not come back: some wait for a part that has ended."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from disagg.cluster.processes import ProcessId, is_alive

NO_CLUSTER_EXIT_CODE = 69
"""Of a process beside a Ray cluster that has waited for it in vain."""

_POLL_S = 0.5
_LOOK_S = 2.0
"""Between two looks so much time counts at most: this process may have stood still itself."""

log = logging.getLogger(__name__)


def end_process(reason: str) -> NoReturn:
    """End this process, which has nothing to stop: it is beside a cluster that others started."""
    log.error("%s, this process ends", reason)
    logging.shutdown()
    os._exit(NO_CLUSTER_EXIT_CODE)


class RayWatch:
    """A thread beside the one that calls Ray, which hears no signal while it is held there.

    Args:
        give_up: called there, once, with the reason; it has to end this process.
        find_parts: the processes without which Ray does not answer now, with their names.
    """

    def __init__(
        self,
        give_up: Callable[[str], None] = end_process,
        find_parts: Callable[[], Mapping[ProcessId, str]] = dict,
    ) -> None:
        self._give_up = give_up
        self._find_parts = find_parts
        self._bound: tuple[float, str, float] | None = None
        self._seen = 0
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="ray-watch", daemon=True).start()

    @contextlib.contextmanager
    def calls(
        self, timeout_s: float = float("inf"), reason: str = "", patience_s: float = 10.0
    ) -> Iterator[None]:
        """Ray is called meanwhile, for ``timeout_s`` at most, also where all its parts run.

        Args:
            timeout_s: without `see`.
            reason: given then; "": that Ray does not answer.
            patience_s: once a part has ended. After a minute Ray's library itself ends the process,
                and leaves everything behind.
        """
        self.see()
        reason = reason or f"Ray does not answer for {timeout_s:g} s"
        self._bound = timeout_s, reason, patience_s
        try:
            yield
        finally:
            self._bound = None

    def see(self) -> None:
        """A call has come back: the time for those that follow begins anew."""
        self._seen += 1

    def end(self) -> None:
        """Nothing is called any more."""
        self._is_over.set()

    def _run(self) -> None:
        looked_s, seen, inside_s, dead_s = time.monotonic(), 0, 0.0, 0.0
        while not self._is_over.wait(_POLL_S):
            now_s = time.monotonic()
            ran_s, looked_s = min(now_s - looked_s, _LOOK_S), now_s
            bound = self._bound
            if bound is None or seen != self._seen:
                seen, inside_s, dead_s = self._seen, 0.0, 0.0
                continue
            inside_s += ran_s
            ended = [name for part, name in self._find_parts().items() if not is_alive(part)]
            dead_s = dead_s + ran_s if ended else 0.0
            timeout_s, reason, patience_s = bound
            if inside_s >= timeout_s:
                self._give_up(reason)
                return
            if dead_s >= patience_s:
                self._give_up(f"Ray's {ended[0]} has ended, and its library waits for it")
                return
