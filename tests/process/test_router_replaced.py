"""Every component restarts under load, and clients that never try again lose nothing."""

import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from disagg.cluster.child import Child
from disagg.cluster.kept_router import KeptRouter
from disagg.config import Settings
from tests.checkpoints import make_checkpoint
from tests.process.harness import HASH_KEY, MODEL, START_S, WAIT_S, wait_until
from tests.process.replicas import Replicas, free_port

pytestmark = pytest.mark.timeout(1200)

NUM_CLIENTS = 4
NUM_TOKENS = 8
DRAIN_MS = 30_000


@dataclass
class Kept:
    """A router that is kept running, as `disagg serve` does, and its workers."""

    folder: Path
    fleet: Replicas
    ports: dict[str, int]
    reports: list[str] = field(default_factory=list)

    def settings(self, **router: Any) -> Settings:
        of_router = {"drain_timeout_ms": DRAIN_MS, "allow_unauthenticated": True} | self.ports
        cluster = {"hash_key": HASH_KEY, "tls_directory": self.fleet.tls_directory}
        settings = Settings.model_validate(
            {
                "model": {"dir": str(self.fleet.model_dir), "name": MODEL},
                "router": of_router | router,
                "cluster": cluster | {"num_prefill": 0, "num_decode": 0, "num_both": 2},
            }
        )
        self.file.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
        return settings

    @property
    def file(self) -> Path:
        return self.folder / "settings.yaml"

    def start(self) -> None:
        command = [sys.executable, "-m", "disagg.commands", "router", "--config", str(self.file)]
        self.router = KeptRouter(command, self.settings(), self.reports.append)
        self.router.start()
        for name in self.fleet.roles:
            self.fleet.start_worker(name)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Until the router takes requests, with both workers in their present lives."""
        for name, process in self.fleet.workers.items():
            assert process.wait_line("serving ", START_S)
            assert process.popen.poll() is None, name
        wait_until(lambda: self.num_ready() == len(self.fleet.workers), "the workers", START_S)

    def num_ready(self) -> int:
        url = f"http://127.0.0.1:{self.ports['admin_port']}/v1/disagg/workers"
        try:
            workers = httpx.get(url, timeout=WAIT_S).json()["workers"]
        except httpx.HTTPError:
            return 0
        return sum(view["ready"] for view in workers)

    def post(self, client: httpx.Client, salt: int) -> str:
        prompt = [7 + (salt * 13 + i * i) % 90 for i in range(40)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        url = f"http://127.0.0.1:{self.ports['http_port']}/v1/completions"
        answer = client.post(url, json=body | {"ignore_eos": True})
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def end(self) -> None:
        self.router.stop(WAIT_S)
        self.fleet.end()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    folder = tmp_path_factory.mktemp("replaced")
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=32)
    ports = {name: free_port() for name in ("http_port", "grpc_port", "admin_port")}
    sources = (f"127.0.0.1:{ports['grpc_port']}",)
    fleet = Replicas(model_dir, folder, {}, {"drain_timeout_ms": DRAIN_MS}, sources)
    started = Kept(folder, fleet, ports)
    try:
        fleet.start()
        fleet.roles |= {"s0": "both", "s1": "both"}
        started.start()
        yield started
    finally:
        started.end()


@pytest.fixture
def kept(started: Kept) -> Kept:
    """Which has reported nothing yet."""
    started.reports.clear()
    return started


class Load:
    """Plain clients: half of them keep their connection, none ever sends a request again."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        with httpx.Client(timeout=WAIT_S) as client:
            self._expected = [kept.post(client, salt) for salt in range(NUM_CLIENTS)]
        self.failures: list[str] = []
        self.num_served = 0
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        self.wait_served()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(4 * WAIT_S)

    def wait_served(self) -> None:
        """Until every client has had answers since now, or one has failed."""
        goal = self.num_served + 3 * NUM_CLIENTS
        wait_until(lambda: self.failures or self.num_served >= goal, "answers", START_S)

    def _ask(self, number: int) -> None:
        client = httpx.Client(timeout=4 * WAIT_S)
        while not self._stop.is_set():
            try:
                text = self._kept.post(client, number)
                if text != self._expected[number]:
                    self.failures.append(f"{text!r} instead of {self._expected[number]!r}")
                self.num_served += 1
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            if number % 2:
                client.close()
                client = httpx.Client(timeout=4 * WAIT_S)
        client.close()


def has_ended(router: Child) -> bool:
    return router.ended


def test_every_component_restarts_and_no_request_fails(kept: Kept) -> None:
    with Load(kept) as load:
        for number in range(2):
            before = kept.router.child
            kept.router.settings = kept.settings(records_max=100 + number)
            kept.router.replace()
            assert kept.router.child is not before, kept.reports
            load.wait_served()
            assert before is not None
            wait_until(partial(has_ended, before), "the router before to end", START_S)
            assert before.exit_code == 0
            kept.router.poll()
            assert not load.failures, load.failures[:3]
        for name in list(kept.fleet.workers):
            process = kept.fleet.workers[name]
            process.popen.send_signal(signal.SIGTERM)
            assert process.popen.wait(START_S) == 0
            kept.fleet.start_worker(name)
            kept.wait_ready()
            load.wait_served()
            assert not load.failures, load.failures[:3]
    assert not load.failures, load.failures[:3]
    assert kept.reports == []


def test_a_router_that_is_stopped_before_another_one_starts_refuses_requests(kept: Kept) -> None:
    """Control: these clients notice a gap."""
    with Load(kept) as load:
        kept.router.stop(WAIT_S)
        kept.router.start()
        kept.wait_ready()
    assert load.failures


def test_one_that_cannot_start_changes_nothing(kept: Kept) -> None:
    before = kept.router.child
    kept.router.settings = kept.settings()
    kept.file.write_text("router: {drain_timeout_ms: never}")
    kept.router.replace()
    assert kept.router.child is before
    assert kept.reports
    with httpx.Client(timeout=WAIT_S) as client:
        kept.post(client, 0)
