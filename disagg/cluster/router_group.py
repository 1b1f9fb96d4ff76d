"""The router's processes: each a router of its own, all on the same ports."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from disagg.cluster.kept_router import KeptRouter
from disagg.config import Settings
from disagg.errors import DisaggError, ExpiredError
from disagg.router.inherited import sibling_socket

CANNOT_START_EXIT_CODE = 2
"""Of a router whose settings, checkpoint or ports cannot be used."""


class RouterGroup:
    """As many router processes as are set, each started again when it ends. Not thread-safe.

    Args:
        command: of one router.
        settings: with all ports decided; its number of processes stays.
        folder: of this run; sockets are made in it.
        report: takes a line for operators.

    Attributes:
        cannot_start: one has ended by its settings, checkpoint or ports before any served.
        was_hurried: nothing could end in its time.
    """

    def __init__(
        self,
        command: list[str],
        settings: Settings,
        folder: Path,
        report: Callable[[str], None],
    ) -> None:
        num = settings.router.processes
        self._links = folder / "siblings" if num > 1 else None
        links = "" if self._links is None else str(self._links)
        self._routers = [
            KeptRouter(command, settings, report, number, links) for number in range(num)
        ]
        self._report = report
        self._has_served = False
        self.cannot_start = self.was_hurried = False

    def start(self) -> None:
        """Start all of them.

        Raises:
            ConfigError: a port is taken.
        """
        if self._links is not None:
            self._links.mkdir(mode=0o700)
        for router in self._routers:
            router.start()

    def poll(self) -> None:
        """Look at each once; what ended is started again when it is time to."""
        for router in self._routers:
            child = router.child
            self._has_served = self._has_served or router.serves
            code = router.poll()
            if code is None or child is None:
                continue
            if self._links is not None:  # one that was killed has left its socket
                sibling_socket(self._links, child.pid).unlink(missing_ok=True)
            if code == CANNOT_START_EXIT_CODE and not self._has_served:
                self.cannot_start = True

    def replace(self, settings: Settings) -> None:
        """Let routers with these settings take the places of those that run, one by one."""
        for router in self._routers:
            router.settings = settings
            router.replace()

    def stop(self, timeout_s: float) -> None:
        """End all at the same time; what they have begun may end first.

        Raises:
            ExpiredError: one had to be killed.
        """
        with ThreadPoolExecutor(len(self._routers)) as threads:
            ends = [threads.submit(partial(router.stop, timeout_s)) for router in self._routers]
        faults = [end.exception() for end in ends]
        told = [error.message for error in faults if isinstance(error, DisaggError)]
        if told:
            raise ExpiredError("; ".join(told))

    def hurry(self) -> None:
        """Let nothing that runs end any more; for a signal handler, while `stop` runs."""
        self.was_hurried = True
        for router in self._routers:
            router.hurry()
