"""Workers of one rank and of two hand over to each other: head ranges, one lease over all."""

from collections.abc import Iterator

import pytest

from tests.process.harness import Cluster, running
from tests.process.served_model import ServedModel, pulled_bytes
from tests.process.test_vllm import FAMILIES, OPTIONS, ROUTER_OPTIONS, WINDOW
from tests.vllm.families import make_family

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

RANKS = ((1, 2), (2, 1))
"""Of the prefill worker, and of the decode worker."""


@pytest.fixture(scope="module", params=RANKS, ids=str)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    family, folder = "gemma3", tmp_path_factory.mktemp("unequal-ranks")
    directory = make_family(folder / family, family, WINDOW)
    case = FAMILIES[family]
    cluster = Cluster(directory, folder, OPTIONS | dict(case.options), ROUTER_OPTIONS)
    with running(cluster):
        for name, role, num_ranks in zip(
            ("p0", "d0"), ("prefill", "decode"), request.param, strict=True
        ):
            cluster.spawn(name, role, tensor_parallel=num_ranks)
        cluster.wait_ready("p0", "d0")
        yield ServedModel(cluster, tolerance=case.tolerance, gap_min=case.gap_min)


def test_handed_over_between_numbers_of_ranks(served: ServedModel) -> None:
    for length in (1, 33, 2 * WINDOW, 7 * WINDOW + 3):
        generation = served.serve(served.prompt(length))
        assert not generation["local"]
        assert pulled_bytes(generation) > 0
    assert served.serve(served.prompt(7 * WINDOW + 3))["hit_tokens"] > 0
