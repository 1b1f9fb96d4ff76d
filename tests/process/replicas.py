"""Replicas of the router and their workers, each a process that gets signals."""

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from disagg.cluster.own_settings import open_ports
from disagg.router.options import RouterOptions
from disagg.tls.authority import create_for_one_run
from disagg.workers.options import WorkerOptions
from tests.process.harness import (
    HERE,
    MODEL,
    ROUTER,
    SMALL,
    START_S,
    WAIT_S,
    Process,
    wait_until,
)
from tests.process.network import Place


def free_port() -> int:
    """A port that is free, and that no connection gets meanwhile: for who comes back with it."""
    while True:
        port = random.choice(open_ports() or range(20_000, 60_000))
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class Router:
    """One replica, in whichever life."""

    name: str
    options: dict[str, Any]
    process: Process
    http: httpx.Client
    admin: httpx.Client
    """To the port of operators."""

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Workers as this router sees them, by name."""
        views = self.admin.get("/v1/disagg/workers").json()["workers"]
        return {view["info"]["incarnation"]["worker_id"]: view for view in views}

    def num_live(self) -> int:
        """Requests that run here."""
        return int(self.admin.get("/health").json()["num_requests"])

    def record(self, request_id: str) -> dict[str, Any]:
        """What this router says of a request."""
        found: dict[str, Any] = self.admin.get(f"/v1/disagg/requests/{request_id}").json()
        return found


@dataclass
class Replicas:
    """Routers and workers over one checkpoint directory.

    Attributes:
        sources: where workers look for routers; every router's address if it is empty.
        client_headers: of every request of this test.
        places: of workers and routers that do not run here.
        modules: what a worker's process runs, where that is not a plain worker.
    """

    model_dir: Path
    logs: Path
    router_options: dict[str, Any] = field(default_factory=dict)
    worker_options: dict[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    client_headers: dict[str, str] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    routers: dict[str, Router] = field(default_factory=dict)
    workers: dict[str, Process] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    epochs: dict[str, str] = field(default_factory=dict)

    def start(self, *routers: str, **roles: str) -> None:
        """Start routers and one worker per ``name=role``; returns when all know each other."""
        self.tls_directory = str(create_for_one_run(self.logs / "certificates"))
        for name in routers:
            self.start_router(name)
        self.roles |= roles
        for name in roles:
            self.start_worker(name)
        self.wait_ready()

    def start_router(self, name: str, **changed: Any) -> None:
        """Start a replica, under the ports it had."""
        known = self.routers.get(name)
        names = ("http_port", "grpc_port", "admin_port") if known is None else ()
        ports = {name: free_port() for name in names}
        secured = ROUTER | {"tls_directory": self.tls_directory}
        given = secured | self.router_options if known is None else known.options
        options = (
            {"host": self.places.get(name, HERE).host} | given | ports | changed | {"name": name}
        )
        whole = RouterOptions(str(self.model_dir), MODEL, **options)
        module, place = "tests.process.router_process", self.places.get(name, HERE)
        process = Process(module, asdict(whole), self.logs / name, place)
        http, admin = (
            httpx.Client(base_url=f"http://{host}:{port}", timeout=120, headers=self.client_headers)
            for host, port in (
                (whole.host, whole.http_port),
                (whole.admin_host, whole.admin_port),
            )
        )
        self.routers[name] = Router(name, options, process, http, admin)

    def start_worker(self, name: str, **changed: Any) -> None:
        """Start a worker, anew if it was there before; with options changed for this life."""
        found = self.sources or tuple(
            f"{one.options['host']}:{one.options['grpc_port']}" for one in self.routers.values()
        )
        place = self.places.get(name, HERE)
        given = SMALL | {"heartbeat_ms": 200, "discovery_ms": 200, "host": place.host}
        given |= self.worker_options
        given["tls_directory"] = self.tls_directory
        given |= {"model_dir": str(self.model_dir), "model_name": MODEL} | changed
        options = WorkerOptions(
            worker_id=name, role=self.roles[name], router_addresses=found, **given
        )
        module = self.modules.get(name, "tests.process.worker_process")
        self.workers[name] = Process(module, asdict(options), self.logs / name, place)

    def wait_ready(self, *routers: str) -> None:
        """Until each router, or those named, has every worker in its present life, and ready."""
        for name, process in self.workers.items():
            said = json.loads(process.wait_line("serving ", START_S)[8:])
            self.epochs[name] = said["epoch"]

        def ready(router: Router) -> bool:
            ended = router.process.popen.poll()
            assert ended is None, f"{router.name} ended, {ended}: {router.process.logged()[-3000:]}"
            with contextlib.suppress(httpx.TransportError):
                known = router.workers()
                return router.http.get("/ready").status_code == 200 and all(
                    name in known
                    and known[name]["info"]["incarnation"]["epoch"] == epoch
                    and known[name]["ready"]
                    for name, epoch in self.epochs.items()
                )
            return False

        for router in self.routers.values():
            if not routers or router.name in routers:
                wait_until(partial(ready, router), f"workers at {router.name}", START_S)

    def end(self) -> None:
        """End everything."""
        for process in (*self.workers.values(), *(r.process for r in self.routers.values())):
            process.kill()
        for router in self.routers.values():
            router.http.close()
            router.admin.close()


@contextlib.contextmanager
def running(replicas: Replicas, *routers: str, **roles: str) -> Iterator[Replicas]:
    """Start replicas and workers and end them whatever happens."""
    try:
        replicas.start(*routers, **roles)
        yield replicas
    finally:
        replicas.end()


@dataclass
class Answer:
    """What a stream brought."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    error: dict[str, Any] | None = None
    """An error event in the stream."""
    done: bool = False
    """It ended with ``[DONE]``."""
    num_tries: int = 1


def stream(client: httpx.Client, body: dict[str, Any], request_id: str = "") -> Iterator[str]:
    """The data of the events of a completion; raises ``httpx.HTTPStatusError`` before the first."""
    headers = {"X-Request-Id": request_id} if request_id else {}
    whole = body | {"stream": True}
    with client.stream("POST", "/v1/completions", json=whole, headers=headers) as answer:
        if answer.status_code != 200:
            answer.read()
            answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield line[6:]


def collect(events: Iterator[str]) -> Answer:
    """The rest of a stream."""
    answer = Answer()
    for event in events:
        if event == "[DONE]":
            answer.done = True
            continue
        data = json.loads(event)
        if "error" in data:
            answer.error = data["error"]
        else:
            answer.text += data["choices"][0]["text"]
    return answer


class SpreadingClient:
    """Takes any replica, and another one where it cannot connect, or where it is told to.

    It does what clients and proxies do by themselves, and no more: nothing is sent again once a
    byte of an answer has come.
    """

    TRIES_MAX = 200

    def __init__(self, urls: list[str], seed: str) -> None:
        self._random = random.Random(seed)
        self._clients = [httpx.Client(base_url=url, timeout=WAIT_S * 4) for url in urls]

    def complete(self, body: dict[str, Any], request_id: str) -> Answer:
        """One stream to its end."""
        for num_tries in range(1, self.TRIES_MAX):
            events = stream(self._random.choice(self._clients), body, request_id)
            try:
                first = next(events)
            except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
                continue
            except httpx.HTTPStatusError as error:
                if error.response.status_code == 503 and "retry-after" in error.response.headers:
                    continue
                raise
            answer = collect(_chain(first, events))
            answer.num_tries = num_tries
            return answer
        raise AssertionError("no replica took the request")

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            client.close()


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest
