"""Hosts and GPUs, divided among workers."""

from typing import Any

import pytest

from disagg.cluster.placement import Placement, has_room, place_workers
from disagg.config import Settings

HEAD: dict[str, Any] = {"Alive": True, "Resources": {"memory": 1.0}}
DEAD: dict[str, Any] = {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}}


def host(num_gpus: int = 0) -> dict[str, Any]:
    gpus = {"GPU": float(num_gpus)} if num_gpus else {}
    return {"Alive": True, "Resources": {"CPU": 8.0} | gpus}


def place(nodes: list[dict[str, Any]], num_workers: int = 2, **worker: str) -> Placement:
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
