"""Tensor-parallel workers: a hand-over is one over all ranks, valid for all or none."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.cluster.processes import find_children
from tests.process.harness import wait_until
from tests.process.served_model import ServedModel, assert_exact, pulled_bytes
from tests.process.test_vllm import WINDOW, started

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_RANKS = 2


@pytest.fixture(scope="module", params=["gemma3", "nemotron_h"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    """``p0`` and ``d0`` of two ranks each; with windows, and with states."""
    folder = tmp_path_factory.mktemp("ranks")
    engines = {"p0": "vllm", "d0": "vllm"}
    yield from started(folder, request.param, engines, tensor_parallel=NUM_RANKS)


def is_resource_tracker(pid: int) -> bool:
    """What Python starts beside spawned processes; nothing depends on it."""
    return "resource_tracker" in Path(f"/proc/{pid}/cmdline").read_text()


def test_handed_over_between_ranks(served: ServedModel) -> None:
    for length in (1, 33, 2 * WINDOW, 7 * WINDOW + 3):
        generation = served.serve(served.prompt(length))
        assert not generation["local"]
        assert (length < 32) or pulled_bytes(generation) > 0
    assert served.serve(served.prompt(7 * WINDOW + 3))["hit_tokens"] > 0


def test_a_rank_that_dies_ends_its_worker_alone(served: ServedModel) -> None:
    """The last test: the decode worker is gone after it, and its request goes on elsewhere."""
    cluster, expected = served.cluster, served.prompt(150, 30)
    told = cluster.tell("d0", "hold steps")
    cluster.tell("d0", "pass steps 4")
    answer = served.ask_later(expected, "moved")
    cluster.wait_told("d0", "held steps", told)
    wait_until(lambda: cluster.record("moved")["num_tokens"] == 5, "five tokens")
    children = find_children(cluster.workers["d0"].popen.pid)
    ranks = [child.pid for child in children if not is_resource_tracker(child.pid)]
    assert len(ranks) == NUM_RANKS
    os.kill(random.Random(0).choice(sorted(ranks)), signal.SIGKILL)
    wait_until(lambda: "d0" not in cluster.living(), "the worker to end with its rank")
    assert_exact(answer.result(60), expected)
    cluster.wait_quiescent()
