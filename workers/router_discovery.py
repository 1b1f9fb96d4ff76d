"""Which routers there are: a list, all addresses of names, or what the cluster knows of them."""

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Sequence

log = logging.getLogger(__name__)

FROM_CLUSTER = "ray"
"""Stands for all routers that have announced themselves in the cluster."""
DNS = "dns:"
ADDRESSES_MAX = 1024
"""Looked after at once, the first ones in order. Not all need be alive: which routers a worker
serves is decided where they open their sessions."""
LOOK_UP_S = 5.0
"""A source that does not answer for so long has said nothing new."""

RoutersOfCluster = Callable[[], Collection[str]]
"""host:port of every router that the cluster knows; may block, and raise anything."""


class RouterDiscovery:
    """Looks the routers up, again and again. A source that fails keeps what it said last.

    Args:
        sources: host:port; ``dns:name:port`` for every address of the name; `FROM_CLUSTER`.
        routers_of_cluster: asked for `FROM_CLUSTER`; None where there is no cluster.

    Attributes:
        found: host:port of every router, as the sources said last.
    """

    def __init__(
        self,
        sources: Sequence[str],
        routers_of_cluster: RoutersOfCluster | None = None,
    ) -> None:
        self._sources = sources
        self._routers_of_cluster = routers_of_cluster
        self._of_source: dict[str, frozenset[str]] = {}
        self.found: frozenset[str] = frozenset()
        self._said: dict[str, str] = {}

    async def look_up(self) -> None:
        """Ask all sources."""
        for source in self._sources:
            try:
                async with asyncio.timeout(LOOK_UP_S):
                    addresses = await self._ask(source)
            except Exception as error:  # a library's own, too
                self._say(source, f"{type(error).__name__}: {error}")
                continue
            self._of_source[source] = addresses
            self._say(source, ", ".join(sorted(addresses)) or "no routers")
        known = sorted(frozenset().union(*self._of_source.values()))
        if len(known) > ADDRESSES_MAX:
            self._say("", f"{len(known)} addresses, the first {ADDRESSES_MAX} are taken")
        self.found = frozenset(known[:ADDRESSES_MAX])

    def finds(self, address: str) -> bool:
        """Whether a router was there when they were looked up last."""
        return address in self.found

    async def _ask(self, source: str) -> frozenset[str]:
        if source == FROM_CLUSTER:
            if self._routers_of_cluster is None:
                raise LookupError("this worker belongs to no cluster")
            return frozenset(await asyncio.to_thread(self._routers_of_cluster))
        if not source.startswith(DNS):
            return frozenset((source,))
        host, _, port = source.removeprefix(DNS).rpartition(":")
        loop = asyncio.get_running_loop()
        entries = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        return frozenset(_host_port(*entry[4][:2]) for entry in entries)

    def _say(self, source: str, what: str) -> None:
        """Log what is new."""
        if self._said.get(source) != what:
            self._said[source] = what
            log.info("routers of %s: %s", source or "all sources", what)


def _host_port(host: object, port: object) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
