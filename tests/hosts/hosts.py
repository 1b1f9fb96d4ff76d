"""Hosts as separate machines: namespaces of network, processes and files, joined by one bridge.

        bridge: a network of its own, without a way out
       /      |      |      \\
      h1     h2     h3     h4       10.11.0.1, 10.11.0.2 ...

Every host has its own processes, its own `/tmp`, `/root`, `/run`, `/dev/shm`, name and sshd; the
rest of the disk is the machine's, and read-only.
"""

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from disagg.cluster.processes import ProcessId, read_process
from tests.hosts.namespaces import BOUND_S, Namespaces, UnavailableError, do, end_stale

SUBNET = "10.11.0"
DEVICE = "wire"
NOWHERE = "02:00:00:00:00:00"
"""A hardware address that no device has: frames to it are lost without a word."""
ADD_BRIDGE = "ip link add bridge type bridge && ip link set bridge up"
POLL_S = 0.02
CLONE_NEWNET = 0x40000000
TOOLS = ("ip", "tc", "nsenter", "unshare", "setpriv", "ssh", "ssh-keygen", "/usr/sbin/sshd")
ROOT = Path(__file__).parents[2]
MAIN = Path(__file__).parent / "host_main.sh"
OWN_FOLDERS = ("/tmp", "/root", "/run")
ENVIRONMENT = {
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
SSHD_CONFIG = """\
HostKey /mnt/keys/ssh_host_key
PidFile /run/sshd.pid
AuthorizedKeysFile /root/.ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
MaxStartups 100
MaxSessions 100
"""


def find_reason_unavailable() -> str:
    """Why hosts cannot be made here; "" where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts need Linux and root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts need {', '.join(missing)} (Debian: iproute2, util-linux, openssh-server)"
    try:
        tried = Namespaces(
            ["bash", "-c", "ip link add bridge0 type bridge && echo ready && read -r _"]
        )
    except (UnavailableError, OSError) as error:
        return f"hosts are not permitted here: {error}"
    tried.end()
    return ""


class Host:
    """One of the hosts; `hosts` makes them.

    Attributes:
        name: as the other hosts know it too.
        address: in the network of the hosts.
    """

    def __init__(self, number: int, keys: Path, shared: Sequence[str]) -> None:
        self.name = f"h{number}"
        self.address = f"{SUBNET}.{number}"
        self._hardware_address = f"02:00:00:00:01:{number:02x}"  # the same after a restart
        self._arguments = [self.name, str(keys), *shared]
        self._space: Namespaces | None = None

    @property
    def space(self) -> Namespaces:
        """What it is made of.

        Raises:
            RuntimeError: it does not run.
        """
        if self._space is None:
            raise RuntimeError(f"host {self.name} does not run")
        return self._space

    @property
    def processes(self) -> set[ProcessId]:
        """All that run on it."""
        return self.space.processes

    def run(
        self,
        command: str,
        *,
        check: bool = True,
        bound_s: float = BOUND_S,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a line of shell in the home of the host's root, to its end.

        Raises:
            AssertionError: it failed, or went on for too long; with what it said.
        """
        with self.popen(command, environment=environment) as process:
            try:
                said, complained = process.communicate(timeout=bound_s)
            except subprocess.TimeoutExpired:
                process.kill()
                said, complained = process.communicate()
                text = f"{self.name}: {command}: not done in {bound_s:g} s: {said}{complained}"
                raise AssertionError(text) from None
        if check and process.returncode:
            text = f"{self.name}: {command}: exit code {process.returncode}: {said}{complained}"
            raise AssertionError(text)
        return subprocess.CompletedProcess(command, process.returncode, said, complained)

    def popen(
        self, command: str, *, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a line of shell in the home of the host's root.

        Killing it kills the shell alone; the host's end ends all that it started.
        """
        given = (ENVIRONMENT | dict(environment or {})).items()
        return subprocess.Popen(
            [
                *self.space.all,
                # The process that enters is no part of the host: what it began would stay.
                *("setpriv", "--pdeathsig", "KILL", "env", "--ignore-environment"),
                *(f"{name}={value}" for name, value in given),
                *("bash", "-c", f"cd; {command}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Inside, what this thread opens, and what threads that it starts do, is in its network.

        Raises:
            OSError: it is not permitted.
        """
        with open("/proc/thread-self/ns/net") as before:
            with open(f"/proc/{self.space.pid}/ns/net") as its:
                _enter(its.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def start(self, bridge: Namespaces) -> None:
        """Start it, with empty folders of its own, and plug it in."""
        if self._space is not None:
            raise RuntimeError(f"host {self.name} runs already")
        self._space = Namespaces(["bash", str(MAIN), *self._arguments])
        with contextlib.suppress(UnavailableError):  # of a host that was killed, it goes by itself
            do(*bridge.network, "ip", "link", "delete", self.name)
        end = ("name", DEVICE, "address", self._hardware_address, "netns", str(self._space.pid))
        cable = ("type", "veth", "peer", *end)
        do(*bridge.network, "ip", "link", "add", self.name, *cable)
        do(*bridge.network, "ip", "link", "set", self.name, "master", "bridge", "up")
        self._ip("link", "set", "lo", "up")
        self._ip("address", "add", f"{self.address}/24", "dev", DEVICE)
        self._ip("link", "set", DEVICE, "up")
        # Look-ups outside would wait for an answer otherwise, seconds for each `ray start`.
        self._ip("route", "add", "unreachable", "default")

    def kill(self) -> None:
        """End it as if its power were cut: processes, memory, network. Harmless when it is."""
        if self._space is not None:
            self._space.end()
            self._space = None

    def pause(self) -> None:
        """Stop every process where it is; the kernel goes on answering for them."""
        while running := [process for process in self._others() if not _is_stopped(process)]:
            _send(running, signal.SIGSTOP)
            time.sleep(POLL_S)

    def resume(self) -> None:
        """Let every process go on."""
        _send(self._others(), signal.SIGCONT)

    def lose(self, other: Self) -> None:
        """From now on what this host sends to the other is lost."""
        entry = (other.address, "lladdr", NOWHERE, "dev", DEVICE, "nud", "permanent")
        self._ip("neighbor", "replace", *entry)

    def find(self, other: Self) -> None:
        """What this host sends to the other arrives again; harmless when it does."""
        with contextlib.suppress(UnavailableError):
            self._ip("neighbor", "delete", other.address, "dev", DEVICE)

    def _ip(self, *arguments: str) -> None:
        do(*self.space.network, "ip", *arguments)

    def _others(self) -> set[ProcessId]:
        """All but the first process, which has to notice the end of the test."""
        return {process for process in self.processes if process.pid != self.space.pid}


class Hosts:
    """Some hosts and the network between them; `hosts` makes them."""

    def __init__(self, num: int, keys: Path, shared: Sequence[Path]) -> None:
        self._keys = keys
        paths = [Path(sys.base_prefix), Path(sys.prefix), ROOT, *shared]
        hidden = [str(path) for path in paths if str(path).startswith(OWN_FOLDERS)]
        self._hosts = [Host(number, keys, hidden) for number in range(1, num + 1)]
        self._bridge: Namespaces | None = None

    @property
    def bridge(self) -> Namespaces:
        """What joins them."""
        assert self._bridge is not None
        return self._bridge

    def start(self) -> None:
        """Make all hosts and their network."""
        end_stale()
        for name in ("ssh_host_key", "id_ed25519"):
            do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._keys / name))
        shutil.copy(self._keys / "id_ed25519.pub", self._keys / "authorized_keys")
        (self._keys / "sshd_config").write_text(SSHD_CONFIG)
        names = [f"{host.address} {host.name}\n" for host in self._hosts]
        (self._keys / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
        self._bridge = Namespaces(["bash", "-c", f"{ADD_BRIDGE} && echo ready && read -r _"])
        for host in self._hosts:
            host.start(self._bridge)

    def end(self) -> None:
        """End all hosts and their network."""
        for host in self._hosts:
            host.kill()
        if self._bridge is not None:
            self._bridge.end()

    def __getitem__(self, number: int) -> Host:
        """A host; the first, which is called h1, has the number 0."""
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        """All of them, in order."""
        return iter(self._hosts)

    def restart(self, host: Host) -> None:
        """Start a host again, at the same address; what its folders held is lost."""
        host.kill()
        host.start(self.bridge)

    def cut(self, *apart: Host) -> None:
        """Lose, silently, all that any two of these send each other; all others reach them."""
        for one, other in itertools.permutations(apart, 2):
            one.lose(other)

    def heal(self, *together: Host) -> None:
        """Take back what `cut` did."""
        for one, other in itertools.permutations(together, 2):
            one.find(other)

    def slow(self, host: Host, megabits: float) -> None:
        """Let a host send, and be sent, so many millions of bits per second at most."""
        for network, device in self._cable(host):
            shape = ("rate", f"{megabits}mbit", "burst", "64kb", "latency", "200ms")
            do(*network, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *shape)

    def hasten(self, host: Host) -> None:
        """Take back what `slow` did."""
        for network, device in self._cable(host):
            do(*network, "tc", "qdisc", "delete", "dev", device, "root")

    def _cable(self, host: Host) -> list[tuple[list[str], str]]:
        """Both ends of it: what an end sends can be held up."""
        return [(self.bridge.network, host.name), (host.space.network, DEVICE)]


@contextlib.contextmanager
def hosts(num: int, keys: Path, shared: Sequence[Path] = ()) -> Iterator[Hosts]:
    """Make hosts, and end them with all that runs there.

    Args:
        num: how many.
        keys: an empty folder of the test, for keys.
        shared: files and folders that every host reads under the path they have here.

    Raises:
        UnavailableError: they cannot be made here.
    """
    made = Hosts(num, keys, shared)
    try:
        made.start()
        yield made
    finally:
        made.end()


def _enter(network: int) -> None:
    """Move this thread there; from Python 3.12 on ``os.setns`` does so."""
    if ctypes.CDLL(None, use_errno=True).setns(network, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _is_stopped(process: ProcessId) -> bool:
    found = read_process(process.pid)
    return found is None or found[0] != process or found[2] in "TtZX"


def _send(processes: Collection[ProcessId], sign: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, sign)
