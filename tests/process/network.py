"""Workers in network namespaces of their own, behind a router that can cut the link between them.

    here (.2) --- (.1) middle (.5) --- (.6) first worker
                         middle (.9) --- (.10) second worker

What goes from one worker to the other can be dropped in the middle, silently, as a network would;
both still reach the test and its router. On request each has a second way to the middle (.14 to
.13, .18 to .17) for its READs alone; its device can be taken away.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

DATA = "data"


@dataclass(frozen=True)
class Place:
    """Where a process runs, and the address it is reached at."""

    host: str = "127.0.0.1"
    command: tuple[str, ...] = ()
    """What its command line begins with."""
    environment: dict[str, str] = field(default_factory=dict)


class UnavailableError(Exception):
    """Namespaces cannot be made here."""


def run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:  # a tool that is not there
        raise UnavailableError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise UnavailableError(f"{' '.join(command)}: {done.stderr.strip()}")


class Network:
    """Two places and the link between them."""

    def __init__(self, name: str, subnet: str) -> None:
        self._names = [f"{name}{part}" for part in ("m", "a", "b")]
        self._middle, *self._ends = self._names
        self._subnet = subnet
        self._device = f"{name}h"
        self.host = f"{subnet}.2"
        self.places = [
            Place(
                f"{subnet}.{4 * n + 6}",
                ("ip", "netns", "exec", end),
                {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "wire"},
            )
            for n, end in enumerate(self._ends)
        ]

    def start(self) -> None:
        for name in self._names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run(
            "ip", "link", "add", self._device, "type", "veth", "peer", "here", "netns", self._middle
        )
        run("ip", "address", "add", f"{self.host}/30", "dev", self._device)
        run("ip", "link", "set", self._device, "up")
        self._up(self._middle, "here", 1)
        for n, end in enumerate(self._ends):
            end_of_wire = ("type", "veth", "peer", f"to{n}", "netns", self._middle)
            run("ip", "-n", end, "link", "add", "wire", *end_of_wire)
            self._up(self._middle, f"to{n}", 4 * n + 5)
            self._up(end, "wire", 4 * n + 6)
            run("ip", "-n", end, "route", "add", "default", "via", f"{self._subnet}.{4 * n + 5}")
        run("ip", "route", "add", f"{self._subnet}.0/24", "via", f"{self._subnet}.1")
        forward = ("sysctl", "-qw", "net.ipv4.ip_forward=1")
        run("ip", "netns", "exec", self._middle, *forward)

    def cut(self) -> None:
        """Drop all that one worker sends to the other, both ways."""
        for rule in self._rules():
            run("ip", "-n", self._middle, "rule", "add", *rule)

    def mend(self) -> None:
        """Let everything pass; harmless where nothing is cut."""
        for rule in self._rules():
            with contextlib.suppress(UnavailableError):
                run("ip", "-n", self._middle, "rule", "del", *rule)

    def lose(self, n: int) -> None:
        """Take a place's link away, as when its machine loses power: nobody is told."""
        run("ip", "-n", self._middle, "link", "set", f"to{n}", "down")

    def separate_data(self) -> None:
        """From now on READs go over devices of their own; before processes start."""
        for n, place in enumerate(self.places):
            place.environment["UCX_NET_DEVICES"] = DATA
            self.give_data(n)

    def give_data(self, n: int) -> None:
        """Give a worker the device for READs, and the way to the other one's."""
        end, gateway = self._ends[n], 4 * n + 13
        at_middle = ("type", "veth", "peer", f"{DATA}{n}", "netns", self._middle)
        run("ip", "-n", end, "link", "add", DATA, *at_middle)
        self._up(self._middle, f"{DATA}{n}", gateway)
        self._up(end, DATA, gateway + 1)
        others = f"{self._subnet}.{4 * (1 - n) + 12}/30"
        run("ip", "-n", end, "route", "add", others, "via", f"{self._subnet}.{gateway}")

    def take_data(self, n: int) -> None:
        """Take it away again, as when a card fails; all else still reaches the worker."""
        run("ip", "-n", self._ends[n], "link", "del", DATA)

    def end(self) -> None:
        """Remove what was made; processes in it must have ended."""
        with contextlib.suppress(UnavailableError):  # its namespace takes it along, but later
            run("ip", "link", "del", self._device)
        for name in self._names:
            with contextlib.suppress(UnavailableError):
                run("ip", "netns", "del", name)

    def _up(self, namespace: str, device: str, number: int) -> None:
        run("ip", "-n", namespace, "address", "add", f"{self._subnet}.{number}/30", "dev", device)
        run("ip", "-n", namespace, "link", "set", device, "up")

    def _rules(self) -> list[list[str]]:
        ways = ((0, self.places[1]), (1, self.places[0]))
        return [["iif", f"to{n}", "to", f"{place.host}/32", "blackhole"] for n, place in ways]


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Make one, under names and addresses of this process.

    Raises:
        UnavailableError: this needs Linux, the ip tool, and root.
    """
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise UnavailableError("network namespaces need the ip tool and root")
    made = Network(f"dt{os.getpid()}", f"10.211.{os.getpid() % 256}")
    try:
        made.start()
        yield made
    finally:
        made.end()
