"""Routers and workers on hosts of a test, started directly."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import httpx

from disagg.cluster.processes import find_children
from tests.hosts.hosts import ROOT, Host
from tests.process.harness import Process
from tests.process.network import Place
from tests.process.replicas import Replicas, Router

HTTP_PORT, GRPC_PORT, ADMIN_PORT = 8000, 8100, 8200


def place_on(host: Host) -> Place:
    """Where a process that the test starts there runs; it ends with the test."""
    command = (*host.space.all, "setpriv", "--pdeathsig", "KILL")
    environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "wire", "PYTHONPATH": str(ROOT)}
    return Place(host.address, command, environment | {"HOME": "/root"})


class FaultyFleet:
    """Two routers on the first host, and one worker on each of the others.

    To be used in the network of the first host: `Host.network`.
    """

    def __init__(self, machines: Sequence[Host], folder: Path, model_dir: Path) -> None:
        self.front, *others = machines
        self.host_of = dict(zip(("p0", "p1", "d0", "d1"), others, strict=True))
        self.replicas = Replicas(
            model_dir,
            folder,
            {"pull_tokens_min": 32, "decode_prefill_tokens_max": 16},
            {"max_step_tokens": 96, "num_blocks": 512},
            places={name: place_on(self.front) for name in ("r0", "r1")},
        )
        self.replicas.places |= {name: place_on(host) for name, host in self.host_of.items()}

    def start(self) -> None:
        """Start all; returns when both routers have every worker ready."""
        replicas = self.replicas
        for number, name in enumerate(("r0", "r1")):
            ports = (HTTP_PORT, GRPC_PORT, ADMIN_PORT)
            names = ("http_port", "grpc_port", "admin_port")
            given = {one: port + number for one, port in zip(names, ports, strict=True)}
            replicas.start_router(name, **given)
        replicas.roles |= {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
        for name in replicas.roles:
            replicas.start_worker(name)
        replicas.wait_ready()

    def come_back(self, name: str) -> None:
        """Start a worker again whose host was killed and runs again; nobody waits for it."""
        self.replicas.places[name] = place_on(self.host_of[name])
        self.replicas.workers[name].kill()
        self.replicas.start_worker(name)

    @property
    def first(self) -> Router:
        """The router whose view counts."""
        return self.replicas.routers["r0"]

    def process_of(self, process: Process) -> int:
        """The pid of what runs on a host; what was started is the program that entered it."""
        (child,) = find_children(process.popen.pid)
        return child.pid

    def is_gone(self, name: str) -> bool:
        """Whether the first router has dropped a worker, or sends it nothing."""
        known = self.first.workers().get(name)
        return known is None or not known["connected"]

    def is_whole(self) -> bool:
        """Whether every router that runs has every worker, ready."""
        with contextlib.suppress(httpx.TransportError):
            for router in self.replicas.routers.values():
                ready = [name for name, view in router.workers().items() if view["ready"]]
                if sorted(ready) != sorted(self.host_of):
                    return False
            return True
        return False
