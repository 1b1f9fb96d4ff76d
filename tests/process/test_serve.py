"""`disagg serve` as a user runs it: real router, real workers, Ctrl-C, and nothing left."""

import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.process.program import BOUND_S, Program, wait_until_gone

pytestmark = pytest.mark.cluster


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Program]:
    make_checkpoint(tmp_path / "tiny", "gemma3")
    ports = ["--http-port", "0", "--grpc-port", "0"]
    started = Program("disagg.cli", "serve", "--model", "tiny", *ports, cwd=tmp_path)
    yield started
    started.end()


def arguments_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def router_pid(served: Program) -> int:
    (pid,) = [p.pid for p in served.tree() if "router" in arguments_of(p.pid)]
    return pid


def router_arguments(served: Program) -> list[str]:
    return arguments_of(router_pid(served))


def get(url: str, path: str) -> tuple[int, object]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_it_serves_until_ctrl_c_and_leaves_nothing(served: Program, tmp_path: Path) -> None:
    url = served.wait_for(r"^serving tiny on (http://[\d.]+:\d+)/v1 \(Ctrl-C stops\)$")[1]
    status, models = get(url, "/v1/models")
    assert status == 200
    assert isinstance(models, dict)
    assert [model["id"] for model in models["data"]] == ["tiny"]
    tree = served.tree()
    folder = Path(router_arguments(served)[-2]).parent
    assert (folder / "router.log").exists()
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(BOUND_S) == 0
    wait_until_gone(tree)
    assert not folder.exists()
    assert os.listdir(tmp_path) == ["tiny"]


def test_the_end_of_the_router_is_told_and_ends_everything(served: Program) -> None:
    served.wait_for("^serving tiny on ")
    tree = served.tree()
    os.kill(router_pid(served), signal.SIGKILL)
    served.wait_for("^disagg: router ended with exit code -9")
    assert served.process.wait(BOUND_S) == 2
    wait_until_gone(tree)
