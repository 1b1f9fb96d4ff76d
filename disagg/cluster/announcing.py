"""A router is announced in the Ray cluster by a process of its own.

Ray ends a process that has joined a cluster when the raylet beside it ends, or when the head has
been away for a minute. A router has to go on then, and to start while there is no head.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from types import FrameType
from typing import NoReturn

from disagg.cluster.kept import Kept
from disagg.cluster.processes import end_with_parent
from disagg.cluster.ray_watch import NO_CLUSTER_EXIT_CODE, RayWatch
from disagg.config import Settings, local_router_address
from disagg.errors import DisaggError, ExpiredError
from disagg.telemetry.log_format import configure_logging

_POLL_S = 0.5
_END_S = 15.0
"""The head may have gone: a call of it takes 5 s, then Ray leaves."""
_ALL_ADDRESSES = ("0.0.0.0", "::")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announced:
    """What the process is told of the settings. No secret: everybody can read its arguments.

    Attributes:
        ray_address: of the cluster.
        join_timeout_s: in which it has to answer.
        address: host:port of the router, as this machine reaches it.
        on_all_addresses: others reach it under the address by which Ray knows this machine.
        heartbeat_ms: how often it is announced.
        log_format: of the process.
    """

    ray_address: str
    join_timeout_s: float
    address: str
    on_all_addresses: bool
    heartbeat_ms: int
    log_format: str

    @classmethod
    def of_settings(cls, settings: Settings) -> "Announced":
        """Of a router.

        Raises:
            ConfigError: its port is not given.
        """
        return cls(
            settings.cluster.ray_address,
            settings.cluster.join_timeout_s,
            local_router_address(settings),
            settings.router.host in _ALL_ADDRESSES,
            settings.cluster.heartbeat_ms,
            settings.telemetry.log_format,
        )


class Announcement:
    """Keeps the process that announces the router of these settings, until it is withdrawn."""

    def __init__(self, settings: Settings) -> None:
        """Start it; it joins the cluster whenever there is one.

        Raises:
            ConfigError: the router's port is not given.
        """
        given = json.dumps(asdict(Announced.of_settings(settings)))
        command = [sys.executable, "-m", __name__, str(os.getpid()), given]
        self._process = Kept("announcement", command, log.warning)
        self._withdrawn = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcement", daemon=True)
        self._thread.start()

    def withdraw(self) -> None:
        """Let nobody find this router any more."""
        self._withdrawn.set()
        self._thread.join()

    def _run(self) -> None:
        # Starts and ends the child: the kernel ends it with the thread that has started it.
        while not self._withdrawn.is_set():
            self._process.poll()
            self._withdrawn.wait(_POLL_S)
        try:
            self._process.stop(_END_S)
        except DisaggError as error:
            log.warning("%s; what it announced expires", error.message)


def main(parent: int, given: str) -> int:
    """Announce a router until SIGTERM, or the end of the process that started this.

    Args:
        parent: that process.
        given: an `Announced`, as JSON.
    """
    try:
        end_with_parent(parent)
        signal.signal(signal.SIGTERM, _interrupt)
        _announce(Announced(**json.loads(given)))
    except ExpiredError as error:
        log.error("%s", error.message)
        return NO_CLUSTER_EXIT_CODE
    except KeyboardInterrupt:
        return 0


def _announce(router: Announced) -> NoReturn:
    logging.Formatter.converter = time.gmtime
    form = "%(asctime)sZ %(levelname)s %(name)s: %(message)s"
    configure_logging(router.log_format, form, {})
    from disagg.cluster.ray_cluster import join_ray, stop_ray

    watch = RayWatch()
    with watch.calls(2 * router.join_timeout_s):
        try:
            join_ray(router.ray_address, router.join_timeout_s)
            from disagg.cluster.router_directory import Announcer  # imports Ray, see ray_cluster

            announcer = Announcer(
                router.address, router.heartbeat_ms, on_all_addresses=router.on_all_addresses
            )
            try:
                while True:
                    if announcer.announce():
                        watch.see()
                    time.sleep(router.heartbeat_ms / 1000)
            finally:
                announcer.withdraw()
        finally:
            stop_ray()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
