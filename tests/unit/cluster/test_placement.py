"""Hosts and GPUs, divided among workers."""

from typing import Any

import pytest

from disagg.cluster.placement import Placement, has_room, place_workers, rank_bundles
from disagg.cluster.ray_cluster import num_cpus
from disagg.config import Settings

HEAD: dict[str, Any] = {"Alive": True, "Resources": {"memory": 1.0}}
DEAD: dict[str, Any] = {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}}


def host(num_gpus: int = 0) -> dict[str, Any]:
    gpus = {"GPU": float(num_gpus)} if num_gpus else {}
    return {"Alive": True, "Resources": {"CPU": 8.0} | gpus}


def place(nodes: list[dict[str, Any]], num_workers: int = 2, **worker: Any) -> Placement:
    cluster = {"num_prefill": 1, "num_decode": num_workers - 1}
    settings = Settings.model_validate({"cluster": cluster, "worker": worker})
    return place_workers(settings, nodes)


@pytest.mark.parametrize(
    ("nodes", "num_workers", "placement"),
    [
        ([host()], 2, Placement("cpu", 0, 1, 2)),
        ([HEAD, DEAD, host(), host()], 2, Placement("cpu", 0, 1, 1)),
        ([host(), host()], 3, Placement("cpu", 0, 1, 2)),
        ([host(2)], 2, Placement("cuda", 1, 1, 2)),
        ([host(1)], 2, Placement("cuda", 0.5, 2, 2)),
        ([host(2)], 3, Placement("cuda", 0.5, 2, 3)),
        ([host(8)], 2, Placement("cuda", 1, 1, 2)),
    ],
)
def test_auto(nodes: list[dict[str, Any]], num_workers: int, placement: Placement) -> None:
    assert place(nodes, num_workers) == placement


@pytest.mark.parametrize(
    ("resources", "enough"),
    [
        ({}, False),
        ({"CPU": 0.2}, False),
        ({"CPU": 8.0, "disagg_prefill": 1.0}, False),
        ({"CPU": 0.2, "disagg_prefill": 1.0, "disagg_decode": 1.0}, True),
    ],
)
def test_hosts_that_have_joined(resources: dict[str, float], enough: bool) -> None:
    settings = Settings.model_validate({"cluster": {"role_resources": True}})
    assert has_room(settings, resources) is enough


def test_what_is_given_is_kept() -> None:
    assert place([host(1)], device="cpu") == Placement("cpu", 0, 1, 2)
    assert place([host(1)], device="cuda") == Placement("cuda", 1, 1, 2)


RANKED = {"tensor_parallel": 4}


@pytest.mark.parametrize(
    ("nodes", "worker", "num_gpus", "backend"),
    [
        ([host(8)], RANKED, 4, "processes"),
        ([host(4), host(4)], RANKED, 4, "processes"),
        ([host(4), host(3)], RANKED, 0, "ray"),  # the second worker's have no room on one host
        ([host(2), host(2), host(4)], RANKED, 0, "ray"),
        ([host(8)], RANKED | {"tensor_parallel_backend": "ray"}, 0, "ray"),
        ([host(2)], RANKED | {"tensor_parallel_backend": "processes"}, 4, "processes"),
        ([host()], RANKED, 0, "processes"),  # a host's cores are shared
        ([host()], RANKED | {"tensor_parallel_backend": "ray"}, 0, "ray"),
        ([host(8)], {"tensor_parallel_backend": "ray"}, 1, "processes"),  # one rank is no rank
    ],
)
def test_who_starts_the_ranks(
    nodes: list[dict[str, Any]], worker: dict[str, Any], num_gpus: int, backend: str
) -> None:
    placement = place(nodes, **worker)
    assert (placement.num_gpus, placement.rank_backend) == (num_gpus, backend)


def test_what_is_reserved_for_ranks_of_several_hosts() -> None:
    given = {
        "worker": {"tensor_parallel": 2, "tensor_parallel_backend": "ray"},
        "cluster": {"num_cpus_per_worker": 2, "role_resources": True},
    }
    settings = Settings.model_validate(given)
    own = {"CPU": 2.0, "disagg_decode": 1.0}
    assert rank_bundles(settings, "cuda", "decode") == [own, {"GPU": 1.0}, {"GPU": 1.0}]
    assert rank_bundles(settings, "cpu", "decode") == [own, {"CPU": 2.0}, {"CPU": 2.0}]
    assert num_cpus(settings) == 12
    assert not has_room(settings, {"CPU": 11, "disagg_prefill": 1, "disagg_decode": 1})


def test_hosts_for_all_ranks_have_joined() -> None:
    worker = {"device": "cuda", "tensor_parallel": 4}
    settings = Settings.model_validate({"worker": worker})
    assert not has_room(settings, {"CPU": 8, "GPU": 7})
    assert has_room(settings, {"CPU": 8, "GPU": 8})
