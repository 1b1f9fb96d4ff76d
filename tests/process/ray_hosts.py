"""A Ray cluster of two hosts: network namespaces, each with a raylet and everything it starts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from disagg.cluster.run_folder import RunFolder
from tests.process.network import Network, Place
from tests.process.program import BOUND_S, ROOT

GCS_PORT = 6379
POLL_S = 0.2


def environment_of(place: Place) -> dict[str, str]:
    """What processes of a host find: its own device, for READs and for what ranks add up."""
    return {
        **os.environ,
        **place.environment,
        "GLOO_SOCKET_IFNAME": place.environment["UCX_NET_DEVICES"],
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_worker_niceness": "0",
        "RAY_raylet_start_wait_time_s": "200",  # on a machine that is busy
    }


class RayHosts:
    """Both hosts' raylets; the first is the head.

    Attributes:
        address: of the cluster.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._made = RunFolder()  # its path is short: sockets lie in it
        self._folder = self._made.path
        self._raylets: list[subprocess.Popen[bytes]] = []
        self.address = f"{network.places[0].host}:{GCS_PORT}"

    def start(self, resources: Sequence[Mapping[str, float]]) -> None:
        """Start the hosts, with these resources, CPUs among them."""
        for number, (place, given) in enumerate(zip(self._network.places, resources, strict=True)):
            named = {name: amount for name, amount in given.items() if name != "CPU"}
            joined = ("--head", f"--port={GCS_PORT}", "--include-dashboard=false")
            command = [
                *place.command,
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                *(joined if number == 0 else (f"--address={self.address}",)),
                f"--node-ip-address={place.host}",
                f"--num-cpus={given['CPU']:g}",
                f"--resources={json.dumps(named)}",
                f"--object-store-memory={80 << 20}",
                f"--temp-dir={self._folder}/{number}",
                "--disable-usage-stats",
            ]
            log = (self._folder / f"{number}.log").open("ab")
            raylet = subprocess.Popen(
                command,
                env=environment_of(place),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
            log.close()
            self._raylets.append(raylet)
            self._wait_until_it_runs(number)

    def _wait_until_it_runs(self, number: int) -> None:
        deadline = time.monotonic() + BOUND_S
        log = self._folder / f"{number}.log"
        while "Ray runtime started" not in log.read_text():
            if self._raylets[number].poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"host {number}: {log.read_text()}")
            time.sleep(POLL_S)

    @property
    def pids(self) -> list[int]:
        """Of what was started here; all else descends from them."""
        return [raylet.pid for raylet in self._raylets]

    def end(self) -> None:
        """End all hosts, whatever runs there."""
        for raylet in reversed(self._raylets):
            raylet.send_signal(signal.SIGTERM)
        for raylet in self._raylets:
            with contextlib.suppress(subprocess.TimeoutExpired):
                raylet.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(raylet.pid, signal.SIGKILL)
        self._made.remove()


@contextlib.contextmanager
def ray_hosts(network: Network, resources: Sequence[Mapping[str, float]]) -> Iterator[RayHosts]:
    """Start a cluster, and end it with all that runs there."""
    hosts = RayHosts(network)
    try:
        hosts.start(resources)
        yield hosts
    finally:
        hosts.end()
