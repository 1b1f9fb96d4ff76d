"""`disagg router` where few files may be open: it asks for more, and tells clients too many."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.process.harness import HASH_KEY, MODEL, WAIT_S
from tests.process.program import Program

pytestmark = pytest.mark.timeout(300)

FEW = 64
"""Hardly more than a router has without clients; it would take half as many of them."""
MANY = 400
NUM_CLIENTS = 100
LINES_MAX = 20
"""asyncio alone writes nine for each connection that it cannot accept, at each try."""
RETRIES_S = 3.0
"""As asyncio tries again every second: the log has to stay short for some of them."""
ANSWER_S = 10.0
"""Half of what a router keeps an idle connection for: then others would have its file."""
HEALTH = b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n"


class LimitedRouter:
    """A router that begins with few files."""

    def __init__(self, folder: Path, files_max: int) -> None:
        ports = [f"--set=router.{name}_port=0" for name in ("http", "grpc", "admin")]
        self.program = Program(
            "disagg.commands",
            "router",
            f"--model={make_checkpoint(folder / 'checkpoint', 'gemma3')}",
            f"--name={MODEL}",
            *ports,
            cwd=folder,
            before=("sh", "-c", f'ulimit -Sn {FEW}; ulimit -Hn {files_max}; exec "$@"', "sh"),
            environment=os.environ | {"DISAGG_CLUSTER__HASH_KEY": HASH_KEY},
        )
        self._port = int(self.program.wait_for(r"router serves .* on http://[\d.]+:(\d+)")[1])

    def ask(self) -> socket.socket:
        """A client that has asked, and looks at no answer yet."""
        client = socket.create_connection(("127.0.0.1", self._port), ANSWER_S)
        client.sendall(HEALTH)
        return client


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Callable[[int], LimitedRouter]]:
    """Starts a router that may ask for so many files."""
    started: list[LimitedRouter] = []

    def start(files_max: int) -> LimitedRouter:
        started.append(LimitedRouter(tmp_path, files_max))
        return started[-1]

    yield start
    for one in started:
        one.program.end()


def test_a_router_asks_for_as_many_files_as_it_may(
    limited: Callable[[int], LimitedRouter],
) -> None:
    router = limited(MANY)
    with ExitStack() as clients:
        asked = [clients.enter_context(router.ask()) for _ in range(NUM_CLIENTS)]
        answers = [one.recv(1 << 16) for one in asked]
    assert not any(b"too_many_connections" in one for one in answers)
    assert all(one.startswith(b"HTTP/1.1 ") for one in answers)


def test_clients_too_many_are_told_so_and_the_log_stays_short(
    limited: Callable[[int], LimitedRouter],
) -> None:
    program = (router := limited(FEW)).program
    (line,) = [one for one in program.lines if "files may be open" in one]
    assert f"{FEW} files may be open" in line
    assert f"so {FEW // 2} connections of clients are taken" in line
    with ExitStack() as clients:
        asked = [clients.enter_context(router.ask()) for _ in range(NUM_CLIENTS)]
        assert asked[0].recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        program.wait_for("connections wait for a free file")
        time.sleep(RETRIES_S)
    with router.ask() as late:
        assert late.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    program.process.terminate()
    assert program.process.wait(WAIT_S) == 0
    program.wait_for("router stopped")
    assert len(program.lines) < LINES_MAX, program.lines
