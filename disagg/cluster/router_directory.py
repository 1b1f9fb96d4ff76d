"""The routers of a Ray cluster: each announces itself to an actor, which workers ask."""

import logging
import secrets
import time
from typing import Any

import ray
from ray.exceptions import RayError

from disagg.workers.actor import DIRECTORY_TIMEOUT_S, ROUTER_DIRECTORY

log = logging.getLogger(__name__)

HEARTBEATS_MISSED_MAX = 10
"""A router that has not announced itself for so many heartbeats is gone."""
ROUTERS_MAX = 1024


class RouterDirectory:
    """Who has announced itself lately; after a restart of the actor all do so again."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}

    def announce(self, announcer: str, address: str, valid_s: float) -> None:
        """A router lives; it is known for so long."""
        self._forget_late()
        if announcer in self._known or len(self._known) < ROUTERS_MAX:
            self._known[announcer] = address, time.monotonic() + valid_s

    def withdraw(self, announcer: str) -> None:
        """A router is about to end."""
        self._known.pop(announcer, None)

    def addresses(self) -> list[str]:
        """host:port of every router's gRPC service."""
        self._forget_late()
        return sorted({address for address, _ in self._known.values()})

    def _forget_late(self) -> None:
        now_s = time.monotonic()
        self._known = {who: one for who, one in self._known.items() if one[1] > now_s}


class Announcer:
    """Announces a router in the cluster this process is connected to. Not thread-safe.

    Args:
        address: host:port of the router, as this machine reaches it.
        heartbeat_ms: how often `announce` is called.
        on_all_addresses: the host is that by which Ray knows this machine.
    """

    def __init__(self, address: str, heartbeat_ms: int, *, on_all_addresses: bool) -> None:
        host, _, port = address.rpartition(":")
        if on_all_addresses:
            host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._address = f"{host}:{port}"
        self._valid_s = heartbeat_ms / 1000 * HEARTBEATS_MISSED_MAX
        self._announcer = secrets.token_hex(8)
        self._said = ""

    def announce(self) -> bool:
        """Say once more that the router lives; whether the cluster has taken it."""
        try:
            taken = _directory().announce.remote(self._announcer, self._address, self._valid_s)
            ray.get(taken, timeout=DIRECTORY_TIMEOUT_S)
            now = ""
        except Exception as error:  # Ray has many; the next try may work
            now = f"not announced: {type(error).__name__}"
        told = now or f"announced as {self._address}"
        if told != self._said:
            log.info("in the Ray cluster %s", told)
            self._said = told
        return not now

    def withdraw(self) -> None:
        """Let nobody find the router any more."""
        try:
            ray.get(_directory().withdraw.remote(self._announcer), timeout=DIRECTORY_TIMEOUT_S)
        except (RayError, ValueError, OSError) as error:
            log.warning("not withdrawn, it expires: %s", error)


def _directory() -> Any:
    """The one actor of the cluster, made by whoever comes first."""
    actor: Any = ray.remote(RouterDirectory)
    return actor.options(
        name=ROUTER_DIRECTORY,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
    ).remote()
