"""Tensor-parallel workers: a hand-over is one over all ranks, valid for all or none."""

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from disagg.cluster.processes import find_children
from tests.checkpoints import make_checkpoint
from tests.process.harness import Cluster, running, wait_until
from tests.process.served_model import ServedModel, assert_exact, pulled_bytes
from tests.process.test_vllm import OPTIONS, ROUTER_OPTIONS, WINDOW
from tests.vllm.engines import VLLM_SHAPE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_RANKS = 2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """``p0`` and ``d0`` of two ranks each."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ranks")
    directory = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW, **VLLM_SHAPE)
    options: dict[str, Any] = OPTIONS | {"tensor_parallel": NUM_RANKS}
    with running(Cluster(directory, folder, options, ROUTER_OPTIONS)) as cluster:
        cluster.spawn("p0", "prefill")
        cluster.spawn("d0", "decode")
        cluster.wait_ready("p0", "d0")
        yield ServedModel(cluster)


def test_handed_over_between_ranks(served: ServedModel) -> None:
    for length in (1, 33, 2 * WINDOW, 7 * WINDOW + 3):
        generation = served.serve(served.prompt(length))
        assert not generation["local"]
        assert (length < 32) or pulled_bytes(generation) > 0


def test_a_rank_that_dies_ends_its_worker_alone(served: ServedModel) -> None:
    """The last test: the decode worker is gone after it, and its request goes on elsewhere."""
    cluster, expected = served.cluster, served.prompt(150, 30)
    told = cluster.tell("d0", "hold steps")
    cluster.tell("d0", "pass steps 4")
    answer = served.ask_later(expected, "moved")
    cluster.wait_told("d0", "held steps", told)
    wait_until(lambda: cluster.record("moved")["num_tokens"] == 5, "five tokens")
    ranks = find_children(cluster.workers["d0"].popen.pid)
    os.kill(random.Random(0).choice(sorted(rank.pid for rank in ranks)), signal.SIGKILL)
    wait_until(lambda: "d0" not in cluster.living(), "the worker to end with its rank")
    assert_exact(answer.result(60), expected)
    cluster.wait_quiescent()
