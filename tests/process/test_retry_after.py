"""What a full router tells who comes, against what its workers then take."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, Cluster, running, wait_until

pytestmark = pytest.mark.timeout(600)

NUM_RUNNING = 12
NUM_WAITING = 12
NUM_CALM = 6
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("retry")
    model_dir = make_checkpoint(
        folder / "model", "qwen3", num_layers=1, max_position_embeddings=1024
    )
    limits = {"requests_max": NUM_RUNNING + NUM_WAITING, "worker_waiting_max": 0}
    house = Cluster(model_dir, folder, {"max_sequences": NUM_RUNNING}, limits)
    with running(house, w0="both"):
        yield house


def ask(cluster: Cluster, number: int) -> httpx.Response:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": [5 + number] * 20,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    return cluster.http.post("/v1/completions", json=body)


def test_after_a_calm_time_it_is_about_as_long_as_it_takes(cluster: Cluster) -> None:
    begun_s = time.monotonic()
    for number in range(NUM_CALM):
        assert ask(cluster, number).status_code == 200
    each_s = (time.monotonic() - begun_s) / NUM_CALM
    with ThreadPoolExecutor(NUM_RUNNING + NUM_WAITING) as threads:
        begun_s = time.monotonic()
        asked = [threads.submit(ask, cluster, n) for n in range(NUM_RUNNING + NUM_WAITING)]
        health = partial(cluster.http.get, "/health")
        wait_until(lambda: health().json()["num_waiting"] == NUM_WAITING, "a full router")
        refused = ask(cluster, 99)
        wait_until(lambda: sum(one.done() for one in asked) > NUM_WAITING, "its time")
        took_s = time.monotonic() - begun_s
        assert {one.result().status_code for one in asked} == {200}
    assert refused.status_code == 429
    said_s = int(refused.headers["retry-after"])
    assert said_s <= 2 * took_s + 1
    assert (NUM_WAITING + 1) * each_s > 2 * took_s + 1, "control: by the calm pace it was too long"
