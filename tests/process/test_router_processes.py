"""Several router processes on one port, as `disagg router` keeps them, over real workers."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from disagg.cluster.own_settings import decide_ports
from disagg.cluster.processes import ProcessId, find_descendants, read_process
from disagg.config import Settings
from tests.checkpoints import make_checkpoint
from tests.process.harness import HASH_KEY, MODEL, START_S, WAIT_S, wait_until
from tests.process.replicas import Replicas, collect, stream

pytestmark = pytest.mark.timeout(1200)

NUM = 2
LONG = 500
"""Tokens of a stream that still runs when something happens to it."""


@dataclass
class Group:
    """`disagg router` with several processes, and its workers."""

    settings: Settings
    fleet: Replicas
    file: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.router.http_port}"

    def admin(self, number: int, path: str) -> httpx.Response:
        port = self.settings.router.admin_port + number
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S)

    def pid(self, number: int) -> int | None:
        """Of a process that serves on its admin port, with all workers there."""
        try:
            workers = self.admin(number, "/v1/disagg/workers").json()["workers"]
            ready = [one for one in workers if one["ready"]]
            if self.admin(number, "/ready").status_code != 200 or len(ready) < 2:
                return None
        except httpx.HTTPError:
            return None
        return self.process_of(number)

    def process_of(self, number: int) -> int | None:
        mark = "--inherited\0"
        for process in self.children():
            words = Path(f"/proc/{process.pid}/cmdline").read_text()
            if mark in words and words.split(mark)[1].split(",")[4] == str(number):
                return process.pid
        return None

    def children(self) -> set[ProcessId]:
        found = read_process(self.process.pid)
        return find_descendants({found[0]}) - {found[0]} if found is not None else set()

    def wait_ready(self) -> list[int]:
        return [
            wait_until(partial(self.pid, number), f"process {number}", START_S)
            for number in range(NUM)
        ]

    def num_served(self, number: int) -> int:
        """Requests that this process has answered."""
        told = self.admin(number, "/metrics").text
        found = re.findall(r'^disagg_requests_total\{.*outcome="length".*\} (\S+)', told, re.M)
        return int(sum(map(float, found)))

    def owner(self) -> int:
        """The process at which the one request runs."""
        told = [self.admin(number, "/health").json()["num_requests"] for number in range(NUM)]
        assert sorted(told) == [0, 1]
        return told.index(1)

    def is_gone(self, number: int) -> bool:
        try:
            self.admin(number, "/health")
        except httpx.ConnectError:
            return True
        except httpx.HTTPError:
            pass  # it is ending
        return False

    def ask(self, request_id: str = "", num_tokens: int = 4) -> httpx.Response:
        """One answer, on a connection of its own."""
        headers = {"X-Request-Id": request_id} if request_id else {}
        url = f"{self.url}/v1/completions"
        return httpx.post(url, json=body(num_tokens), headers=headers, timeout=START_S)

    def begun(self, client: httpx.Client) -> Iterator[str]:
        events = stream(client, body(LONG))
        first = next(events)

        def rest() -> Iterator[str]:
            yield first
            yield from events

        return rest()


def has_ended(process: ProcessId) -> bool:
    return not find_descendants({process})


def command(file: Path) -> list[str]:
    return [sys.executable, "-m", "disagg.commands", "router", "--config", str(file)]


def body(num_tokens: int) -> dict[str, Any]:
    prompt = [7 + i * i % 90 for i in range(40)]
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replicas, Settings]]:
    folder = tmp_path_factory.mktemp("fleet")
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=32)
    fleet = Replicas(model_dir, folder)
    try:
        fleet.start()
        cluster = {"hash_key": HASH_KEY, "tls_directory": fleet.tls_directory}
        settings = decide_ports(
            Settings.model_validate(
                {
                    "model": {"dir": str(model_dir), "name": MODEL},
                    "router": {
                        "processes": NUM,
                        "http_port": 0,
                        "grpc_port": 0,
                        "admin_port": 0,
                        "drain_timeout_ms": 600_000,
                    },
                    "cluster": cluster | {"num_prefill": 0, "num_decode": 0, "num_both": 2},
                }
            )
        )
        fleet.sources = (f"127.0.0.1:{settings.router.grpc_port}",)
        fleet.roles |= {"s0": "both", "s1": "both"}
        for name in fleet.roles:
            fleet.start_worker(name)
        yield fleet, settings
    finally:
        fleet.end()


@pytest.fixture(scope="module")
def kept(
    fleet: tuple[Replicas, Settings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Group]:
    replicas, settings = fleet
    file = tmp_path_factory.mktemp("group") / "settings.yaml"
    file.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    started = Group(settings, replicas, file, subprocess.Popen(command(file)))
    try:
        yield started
    finally:
        left = started.children()
        started.process.kill()
        started.process.wait()
        for child in left:  # they end with their parent
            wait_until(partial(has_ended, child), "a child's end", START_S)


@pytest.fixture
def group(kept: Group) -> Group:
    """All processes with all workers, started anew where a test has ended them."""
    if kept.process.poll() is not None:
        kept.process = subprocess.Popen(command(kept.file))
    kept.wait_ready()
    return kept


def test_all_processes_serve_one_port_and_any_knows_every_request(group: Group) -> None:
    ids: list[str] = []
    before = [group.num_served(number) for number in range(NUM)]
    while not all(group.num_served(number) > before[number] for number in range(NUM)):
        assert len(ids) < 100, "one process gets no connection"
        ids.append(f"r{len(ids)}")
        assert group.ask(ids[-1]).status_code == 200
    served = [group.num_served(number) for number in range(NUM)]
    assert sum(served) == sum(before) + len(ids), "each request is one process's"
    for number in range(NUM):
        for request_id in ids:
            record = group.admin(number, f"/v1/disagg/requests/{request_id}")
            assert (record.status_code, record.json()["request_id"]) == (200, request_id)
        # Negative control: what no process has served is known nowhere.
        assert group.admin(number, "/v1/disagg/requests/never").status_code == 404
        status = group.admin(number, "/v1/disagg/status").json()
        assert status["router"]["router_id"].partition(":")[0].endswith(f"-{number}")
    assert [group.num_served(number) for number in range(NUM)] == served


def test_a_request_sent_again_is_served_once_whichever_process_has_it(group: Group) -> None:
    for _ in range(100):
        with httpx.Client(base_url=group.url, timeout=START_S) as client:
            first = stream(client, body(LONG), "again")
            next(first)
            before = [group.num_served(number) for number in range(NUM)]
            has_it = [group.admin(number, "/health").json() for number in range(NUM)]
            assert group.ask("again").status_code == 200
            end = collect(first)
        assert end.error is not None
        assert end.error["code"] == "superseded", "two were served"
        owner = next(n for n in range(NUM) if has_it[n]["num_requests"])
        if group.num_served(1 - owner) > before[1 - owner]:
            return  # the second one came to the other process
    raise AssertionError("one process gets no connection")


def test_one_that_is_killed_comes_back_and_the_others_serve_on(group: Group) -> None:
    pids = [pid for number in range(NUM) if (pid := group.pid(number))]
    with httpx.Client(base_url=group.url, timeout=START_S) as client:
        kept = group.begun(client)
        lost = 1 - group.owner()
        os.kill(pids[lost], signal.SIGKILL)
        wait_until(lambda: group.is_gone(lost), "its end", START_S)
        back = None
        while back is None:  # new connections are never refused meanwhile
            assert group.ask().status_code == 200
            back = group.pid(lost)
        assert back != pids[lost]
        assert group.pid(1 - lost) == pids[1 - lost]
        assert collect(kept).done, "the other process's stream"
    before = group.num_served(lost)
    for _ in range(100):
        assert group.ask().status_code == 200
        if group.num_served(lost) > before:
            return
    raise AssertionError("the process that came back gets no connection")


@pytest.mark.slow
def test_one_that_stands_still_is_replaced(group: Group) -> None:
    pids = [pid for number in range(NUM) if (pid := group.pid(number))]
    os.kill(pids[1], signal.SIGSTOP)
    wait_until(lambda: group.process_of(1) not in (None, pids[1]), "another process", START_S)
    assert group.wait_ready()[0] == pids[0]
    assert group.ask().status_code == 200


def test_a_port_that_is_taken_is_an_error_and_no_lottery(group: Group) -> None:
    second = subprocess.run(command(group.file), capture_output=True, text=True, timeout=START_S)
    assert second.returncode == 2
    assert "router.http_port" in second.stderr
    assert group.ask().status_code == 200


def test_sigterm_lets_streams_end_and_leaves_nothing(group: Group) -> None:
    children = group.children()
    with httpx.Client(base_url=group.url, timeout=START_S) as client:
        events = group.begun(client)
        owner = group.owner()
        group.process.send_signal(signal.SIGTERM)
        wait_until(lambda: group.is_gone(1 - owner), "who has nothing to end", START_S)
        assert group.admin(owner, "/ready").status_code == 503
        refused = group.ask()
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert collect(events).done
    assert group.process.wait(START_S) == 0
    assert len(children) >= NUM
    assert not find_descendants(children)
    with pytest.raises(httpx.ConnectError):
        group.ask()


def test_a_second_signal_does_not_wait(group: Group) -> None:
    children = group.children()
    with httpx.Client(base_url=group.url, timeout=START_S) as client:
        events = group.begun(client)
        owner = group.owner()
        group.process.send_signal(signal.SIGINT)
        wait_until(lambda: group.admin(owner, "/ready").status_code == 503, "it to drain", START_S)
        group.process.send_signal(signal.SIGINT)
        with pytest.raises(httpx.HTTPError):
            collect(events)
    assert group.process.wait(START_S) == 130
    assert not find_descendants(children)
