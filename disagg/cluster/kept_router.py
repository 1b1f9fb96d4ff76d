"""The router that `disagg serve` keeps running; another one takes its place without a refusal."""

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection

from disagg.cluster.child import Child
from disagg.cluster.kept import Kept
from disagg.config import Settings
from disagg.errors import ConfigError, DisaggError
from disagg.router.http_server import bind
from disagg.router.inherited import BEAT, BOUND, SERVING, Inherited

_BOUND_S = 120.0
"""Until a router has loaded its tokenizer and has its ports."""
_SERVES_S = 90.0
"""Until it serves: longer than it waits for workers itself."""
_PORT_RETRY_S = 5.0
_STILL_S = 30.0
"""A router that stands still for so long is ended: workers have ended its sessions long before, so
no answer of it can go on, but it holds the connections that the kernel goes on to give it."""
_LOOK_S = 1.0
"""Between two looks so much time counts at most: this process may have stood still itself."""
_Address = tuple[str, int]


class KeptRouter(Kept):
    """A router's process, and the sockets of its HTTP ports, which belong to this process.

    Two routers have them while one takes the other's place: what connects meanwhile is accepted by
    either, and nobody is refused. The sockets live as long as a router does, so that without one
    clients are refused at once, and go elsewhere.

    Args:
        command: of a router.
        settings: of the first one.
        report: takes a line for operators.
        number: where several processes serve on one HTTP port. The admin port of each is its own:
            the number is added to it.
        folder: where these find each other; "": this one is alone on its port.

    Attributes:
        settings: those of the next router.
    """

    def __init__(
        self,
        command: list[str],
        settings: Settings,
        report: Callable[[str], None],
        number: int = 0,
        folder: str = "",
    ) -> None:
        super().__init__(f"router process {number}" if folder else "router", command, report)
        self.settings = settings
        self._number = number
        self._folder = folder
        self._has_run = False
        self._sockets: dict[_Address, socket.socket] = {}
        self._told = -1
        self._said = b""
        self._still_s = self._looked_s = 0.0
        self._leaving: list[tuple[Child, float]] = []

    def start(self) -> None:
        """Start it, with sockets of its own."""
        self._keep_only(())
        self._bind()
        # One that comes back leaves connections to the others until it has its workers.
        self.child = self._spawn(waits=bool(self._folder) and self._has_run)
        self._has_run = True
        self.began()

    @property
    def serves(self) -> bool:
        """Whether the newest router has said that it serves."""
        return self.child is not None and self._says(SERVING, self.child, 0.0)

    def poll(self) -> int | None:
        """See `Kept.poll`; one that stands still is ended, and so are replaced ones in time."""
        self._look_whether_it_stands_still()
        for child, until_s in list(self._leaving):
            if not child.ended and time.monotonic() > until_s:
                self._end(child, 0.0)
            if child.ended:
                self._leaving.remove((child, until_s))
        try:
            code = super().poll()
        except ConfigError as error:  # somebody else has taken a port meanwhile
            self._report(error.message)
            self._start_at_s = time.monotonic() + _PORT_RETRY_S
            return None
        if self.child is None:
            self._keep_only(())  # who connects is refused until there is another one
        return code

    def replace(self) -> None:
        """Let a router with the present settings take the place of the one that runs.

        It takes the ports, then workers register with it instead, then it serves, and only then the
        old one ends, when what it has begun is over. One that cannot start changes nothing.
        """
        old = self.child
        if old is None or old.ended:
            return  # the next one that starts has the new settings
        before = dict(self._sockets)
        try:
            self._bind()
        except ConfigError as error:
            self._report(f"the router goes on with its old settings: {error.message}")
            self._keep_only(before.keys())
            return
        told, said, self._told = self._told, self._said, -1
        new = self._spawn(waits=True)
        if not self._says(BOUND, new, _BOUND_S):
            self._report("the router goes on with its old settings: the new one did not start")
            self._end(new, 0.0)
            self._keep_only(before.keys())
            told, self._told, self._said = self._told, told, said  # the old one is heard again
            os.close(told)
            return
        os.close(told)
        old.signal(signal.SIGHUP)
        if not self._says(SERVING, new, _SERVES_S):
            self._report("the new router does not serve yet")
        old.signal(signal.SIGTERM)
        router, cluster = self.settings.router, self.settings.cluster
        until_s = time.monotonic() + router.drain_timeout_ms / 1000 + cluster.stop_timeout_s
        self._leaving.append((old, until_s))
        self._keep_only(self._addresses())
        self.child = new
        self.began()

    def stop(self, timeout_s: float) -> None:
        """End it, if it runs, and those that it has replaced."""
        try:
            super().stop(timeout_s)
        finally:
            for child, _ in self._leaving:
                self._end(child, timeout_s)
            self._leaving.clear()
            self._keep_only(())

    def hurry(self) -> None:
        """See `Kept.hurry`; those that were replaced end as well."""
        super().hurry()
        for child, _ in self._leaving:
            child.hurry()

    # --- inside

    def _addresses(self) -> tuple[_Address, _Address]:
        router = self.settings.router
        admin_port = router.admin_port + self._number
        return (router.host, router.http_port), (router.admin_host, admin_port)

    def _bind(self) -> None:
        """Have a socket for each port; those that there are stay."""
        limits = self.settings.limits
        bounds = limits.send_buffer_bytes, limits.send_timeout_ms
        shared = (bool(self._folder), False)
        names = ("http_port", "admin_port")
        for name, (host, port), is_shared in zip(names, self._addresses(), shared, strict=True):
            if (host, port) not in self._sockets:
                self._sockets[host, port] = bind(name, host, port, *bounds, is_shared=is_shared)

    def _keep_only(self, addresses: Collection[_Address]) -> None:
        for address in [one for one in self._sockets if one not in addresses]:
            self._sockets.pop(address).close()

    def _spawn(self, *, waits: bool) -> Child:
        """A router process that has the sockets, and says how far it is."""
        if self._told >= 0:
            os.close(self._told)
        self._told, tells = os.pipe()
        os.set_blocking(tells, False)
        self._said = b""
        http, admin = (self._sockets[one].fileno() for one in self._addresses())
        inherited = Inherited(http, admin, tells, waits, self._number, self._folder)
        command = [*self._command, "--inherited", inherited.to_text()]
        try:
            return Child(self._name, command, None, (http, admin, tells))
        finally:
            os.close(tells)

    def _says(self, word: bytes, child: Child, timeout_s: float) -> bool:
        """Wait until a router has said a word; False when it ends, or the time is over."""
        until_s = time.monotonic() + timeout_s
        while word not in self._said:
            left_s = until_s - time.monotonic()
            heard = self._hear(min(max(0.0, left_s), 0.2))
            if heard == b"" or (heard is None and (left_s <= 0 or child.ended)):
                return False
        return True

    def _hear(self, timeout_s: float) -> bytes | None:
        """What the newest router says; None: nothing in that time, b"": nothing ever any more."""
        if not select.select([self._told], [], [], timeout_s)[0]:
            return None
        heard = os.read(self._told, 4096)
        self._said += heard.replace(BEAT, b"")
        return heard

    def _look_whether_it_stands_still(self) -> None:
        now_s = time.monotonic()
        since_s, self._looked_s = now_s - self._looked_s, now_s
        if self.child is None:
            return
        if self._hear(0.0) or SERVING not in self._said:
            self._still_s = 0.0
            return
        self._still_s += min(since_s, _LOOK_S)
        if self._still_s > _STILL_S and not self.child.ended:
            self._report(f"{self._name} stands still for {_STILL_S:g} s: it is ended")
            self.child.signal(signal.SIGKILL)
            self._still_s = 0.0

    def _end(self, child: Child, timeout_s: float) -> None:
        try:
            child.stop(timeout_s)
        except DisaggError as error:
            self._report(error.message)
