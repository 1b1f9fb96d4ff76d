"""A router that is announced in a Ray cluster needs none: it starts without, and outlives it."""

import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.cluster.processes import ProcessId, find_descendants
from tests.checkpoints import make_checkpoint
from tests.process.program import Program
from tests.process.replicas import free_port

pytestmark = pytest.mark.timeout(900)

BOUND_S = 240.0
FOUND = """
import sys
from disagg.cluster.ray_cluster import join_ray
from disagg.workers.actor import routers_of_cluster

join_ray(sys.argv[1], 60)
print("found", *routers_of_cluster())
"""
SERVES = r"router serves \S+ on http://([^ :]+):(\d+),"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_layers=1)


@pytest.fixture
def running() -> Iterator[list[Program]]:
    programs: list[Program] = []
    yield programs
    for program in reversed(programs):
        program.end()


def start_router(checkpoint: Path, address: str, token: str = "", **changes: object) -> Program:
    given = {
        "model.dir": checkpoint,
        "cluster.ray_address": address,
        "cluster.router_addresses": "ray",
        "cluster.hash_key": "ab" * 32,
        "cluster.allow_insecure": "true",
        "router.http_port": "0",
        "router.admin_port": "0",
        "router.grpc_port": free_port(),
        **changes,
    }
    options = [f"--set={key}={value}" for key, value in given.items()]
    return Program(
        "disagg.commands",
        "router",
        *options,
        cwd=checkpoint,
        environment=os.environ | with_token(token),
    )


def with_token(token: str) -> dict[str, str]:
    """Variables of who joins a cluster that asks for one."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}


def found_routers(address: str, token: str) -> list[str]:
    """host:port of those that workers of a cluster would find."""
    told = subprocess.run(
        [sys.executable, "-c", FOUND, address],
        env=os.environ | with_token(token),
        stdout=subprocess.PIPE,
        text=True,
        timeout=BOUND_S,
        check=True,
    )
    (line,) = re.findall(r"^found(.*)$", told.stdout, re.MULTILINE)
    return str(line).split()


def health(host: str, port: int) -> int:
    """Status of the answer to a question for its health."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


def test_it_starts_while_there_is_no_cluster(checkpoint: Path, running: list[Program]) -> None:
    router = start_router(checkpoint, f"127.0.0.1:{free_port()}")
    running.append(router)
    serves = router.wait_for(SERVES, BOUND_S)
    assert health(serves[1], int(serves[2])) == 200
    tree = router.tree()
    router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(BOUND_S) == 0
    assert not find_descendants(tree), "what announces it ends with it"


@pytest.mark.slow
@pytest.mark.cluster
def test_it_serves_on_when_ray_ends_beside_it(checkpoint: Path, running: list[Program]) -> None:
    ray = Program("tests.process.ray_main", str(checkpoint), cwd=checkpoint)
    running.append(ray)
    found = ray.wait_for(r"^ray (\S+) (\w+)$", BOUND_S)
    router = start_router(checkpoint, found[1], found[2])
    running.append(router)
    serves, _ = router.wait_for_all([SERVES, "in the Ray cluster announced as"], BOUND_S)
    for process in raylets(ray):
        os.kill(process.pid, signal.SIGKILL)
    router.wait_for("announcement ended with exit code", BOUND_S)
    assert health(serves[1], int(serves[2])) == 200
    router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(BOUND_S) == 0


@pytest.mark.slow
@pytest.mark.cluster
def test_one_that_ends_in_order_is_withdrawn(checkpoint: Path, running: list[Program]) -> None:
    """At once: what is only announced no more would be found for 100 s."""
    ray = Program("tests.process.ray_main", str(checkpoint), cwd=checkpoint)
    running.append(ray)
    found = ray.wait_for(r"^ray (\S+) (\w+)$", BOUND_S)
    rarely: dict[str, object] = {
        "cluster.heartbeat_ms": 10_000,
        "router.worker_silent_ms": 30_000,
    }
    router = start_router(checkpoint, found[1], found[2], **rarely)
    running.append(router)
    announced = router.wait_for(r"in the Ray cluster announced as (\S+)", BOUND_S)
    assert found_routers(found[1], found[2]) == [announced[1]]
    router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(BOUND_S) == 0
    assert found_routers(found[1], found[2]) == []


def raylets(ray: Program) -> list[ProcessId]:
    """What Ray ends its drivers with."""
    tree = ray.tree()
    titles = {one: Path(f"/proc/{one.pid}/cmdline").read_bytes().decode() for one in tree}
    found = [one for one, title in titles.items() if re.search("/(raylet|gcs_server)\0", title)]
    assert len(found) == 2
    return found
