"""The automatic mode in a system as a user starts it: load makes it larger, and the end of it
smaller again, while no request fails."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.process.program import Program

# Slow, as a run of the normal tests starts one Ray cluster only: that of test_serve.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

BOUND_S = 600.0
NUM_CLIENTS = 6


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Program]:
    make_checkpoint(tmp_path / "tiny", "gemma3")
    settings = (
        "router.admin_port=0",
        "worker.device=cpu",
        "worker.num_threads=1",
        "worker.num_blocks=1024",
        "scheduling.max_sequences=1",  # of several requests all but one wait
        "limits.worker_waiting_max=0",
        "transfer.reserve_timeout_ms=30000",
        "autoscale.decode=1-2",
        "autoscale.target_queue_ms=100",
        "autoscale.up_after_ms=2000",
        "autoscale.down_after_ms=8000",
    )
    given = [part for setting in settings for part in ("--set", setting)]
    ports = ("--http-port", "0", "--grpc-port", "0")
    started = Program("disagg.commands", "serve", "--model", "tiny", *ports, *given, cwd=tmp_path)
    yield started
    started.end()


class Load:
    """Clients that ask again and again, and no request twice.

    Attributes:
        failures: what was no answer.
        num_served: answers.
    """

    def __init__(self, url: str) -> None:
        self.failures: list[str] = []
        self.num_served = 0
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _ask(self) -> None:
        body = {"model": "tiny", "prompt": [*range(20, 60)], "max_tokens": 32, "ignore_eos": True}
        while not self._stop.is_set():
            status, answer = post(self._url, json.dumps(body))
            if status != 200:
                self.failures.append(f"{status} {answer}")
            self.num_served += 1


def post(url: str, body: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_load_adds_a_worker_and_its_end_takes_one_away(served: Program) -> None:
    url = served.wait_for(r"^serving \S+ on (http://\S+)/v1", BOUND_S)[1]
    with Load(url) as load:
        served.wait_for(r"^requests wait \d+ ms for decode$", BOUND_S)
        served.wait_for(r"^wanted, by autoscale: prefill 1, decode 2$", BOUND_S)
        served.wait_for(r"^worker decode-1 serves on", BOUND_S)
        served.wait_for(r"^all workers serve$", BOUND_S)
    served.wait_for(r"^wanted, by autoscale: prefill 1, decode 1$", BOUND_S)
    served.wait_for(r"^worker decode-1 has ended$", BOUND_S)
    assert load.num_served > NUM_CLIENTS
    assert not load.failures, load.failures[:3]
    # No more than one step up and one back.
    changes = [line for line in served.lines if re.search("^wanted, by autoscale", line)]
    assert len(changes) == 3, changes  # the first says who decides from the start
