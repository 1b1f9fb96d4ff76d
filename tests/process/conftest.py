"""One cluster per checkpoint family, shared by all tests of this folder."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint, reference_generate
from tests.process.harness import Cluster
from tests.process.served_model import PRINTABLE_IDS, WINDOW, ServedModel, add_eos

SHARED = "gemma3"
"""Kept for the whole run; of the other families only the last one asked for."""
OPTIONS = {"max_step_tokens": 96, "reserve_timeout_ms": 30_000, "reserve_passes_max": 1_000}
"""Long prompts come in several chunks; a partner that is slow is waited for."""
ROUTER_OPTIONS = {
    "worker_silent_ms": 60_000,  # one that a test stopped, or a busy machine starved, stays known
    "pull_tokens_min": 64,  # the histories of tests are shorter than those worth pulling
}
LAYERS = {"gemma2": 7}
"""Four window layers and three full ones do not fill their blocks evenly: there is padding."""
EOS_PROMPT = tuple(random.Random("eos").choices(PRINTABLE_IDS, k=50))


class Clusters:
    """Starts clusters when they are first asked for: a worker takes seconds to start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._served: dict[str, ServedModel] = {}

    def get(self, family: str) -> ServedModel:
        if family not in self._served:
            for other in self._served.keys() - {SHARED, family}:
                self._served.pop(other).cluster.end()
            self._served[family] = self._start(family)
        return self._served[family]

    def end(self) -> None:
        for served in self._served.values():
            served.cluster.end()

    def _start(self, family: str) -> ServedModel:
        directory = make_checkpoint(
            self._folder / family, family, window=WINDOW, num_layers=LAYERS.get(family)
        )
        (eos_id,), _, _ = reference_generate(directory, EOS_PROMPT, 1)
        add_eos(directory, eos_id)
        logs = self._folder / f"{family}-logs"
        logs.mkdir(exist_ok=True)
        cluster = Cluster(directory, logs, worker_options=OPTIONS, router_options=ROUTER_OPTIONS)
        try:
            cluster.start(p0="prefill", d0="decode")
        except BaseException:
            cluster.end()
            raise
        return ServedModel(cluster, eos_id)


@pytest.fixture(scope="package")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    torch.set_num_threads(1)  # the reference beside two workers
    started = Clusters(tmp_path_factory.mktemp("served"))
    yield started
    started.end()


@pytest.fixture
def gemma3(clusters: Clusters) -> Iterator[ServedModel]:
    """Five window layers to one full; nothing is cached, all that is free is poisoned."""
    served = clusters.get("gemma3")
    served.restore()
    yield served
    served.settle()


@pytest.fixture
def gemma2(clusters: Clusters) -> Iterator[ServedModel]:
    """Blocks with padding."""
    served = clusters.get("gemma2")
    served.restore()
    yield served
    served.settle()


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    """Named by an indirect parameter; of this scope so that a family's tests run in a row."""
    name: str = request.param
    return name


@pytest.fixture
def served(clusters: Clusters, family: str) -> Iterator[ServedModel]:
    """The family that the test's parameter names."""
    served = clusters.get(family)
    served.restore()
    yield served
    served.settle()
