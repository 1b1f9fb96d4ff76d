"""What each worker gets of the hosts and GPUs that Ray has."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from disagg.cluster.ray_cluster import num_cpus, num_workers
from disagg.config import Settings
from disagg.workers.options import AUTO


@dataclass(frozen=True, slots=True)
class Placement:
    """The same for every worker.

    Attributes:
        device: cpu or cuda.
        num_gpus: GPUs that Ray counts for a worker's own process.
        workers_per_gpu: so many share one.
        workers_per_host: so many share a host, where Ray spreads them evenly.
        rank_backend: who starts a worker's ranks.
    """

    device: str
    num_gpus: float
    workers_per_gpu: int
    workers_per_host: int
    rank_backend: Literal["processes", "ray"] = "processes"


def has_room(settings: Settings, resources: Mapping[str, float]) -> bool:
    """Whether hosts for all workers have joined.

    Args:
        settings: how many workers, and the resources of each.
        resources: of all hosts together, as ``ray.cluster_resources()`` lists them.
    """
    cluster = settings.cluster
    asked: dict[str, float] = {"CPU": num_cpus(settings)}
    if settings.worker.device == "cuda" and settings.worker.tensor_parallel > 1:
        asked["GPU"] = num_workers(settings) * settings.worker.tensor_parallel
    if cluster.role_resources:
        asked |= {"disagg_prefill": cluster.num_prefill, "disagg_decode": cluster.num_decode}
    return all(resources.get(name, 0) >= amount for name, amount in asked.items())


def place_workers(settings: Settings, nodes: Sequence[Mapping[str, Any]]) -> Placement:
    """Divide hosts and GPUs among the workers.

    ``worker.device`` auto takes the GPUs where Ray has any; workers share them if there are fewer
    than workers.

    Args:
        settings: how many workers, and the resources of each.
        nodes: as ``ray.nodes()`` lists them.
    """
    count = num_workers(settings)
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    num_hosts = sum(1 for each in resources if each.get("CPU", 0) > 0) or 1
    num_gpus = int(sum(each.get("GPU", 0) for each in resources))
    device, share = settings.worker.device, settings.cluster.num_gpus_per_worker
    if device == AUTO:
        device = "cuda" if num_gpus else "cpu"
        share = min(share, 1 / math.ceil(count / num_gpus)) if num_gpus else 0.0
    elif device == "cpu":
        share = 0.0
    backend: Literal["processes", "ray"] = "processes"
    num_ranks = settings.worker.tensor_parallel
    if num_ranks > 1:
        at_once = sum(int(each.get("GPU", 0)) // num_ranks for each in resources)
        backend = _rank_backend(settings, device == "cpu" or at_once >= count)
        if device == "cuda":
            share = num_ranks if backend == "processes" else 0.0  # a GPU for each rank
    return Placement(
        device=device,
        num_gpus=share,
        workers_per_gpu=max(1, int(1 / share)) if share else 1,
        workers_per_host=math.ceil(count / num_hosts),
        rank_backend=backend,
    )


def _rank_backend(settings: Settings, hosts_are_enough: bool) -> Literal["processes", "ray"]:
    """Who starts the ranks; Ray where single hosts have no room for a worker's."""
    named = settings.worker.tensor_parallel_backend
    if named == AUTO:
        return "processes" if hosts_are_enough else "ray"
    return named


def rank_bundles(settings: Settings, device: str, role: str) -> list[dict[str, float]]:
    """What Ray reserves for a worker whose ranks it starts: its own process, then each rank.

    Args:
        settings: the resources of each worker.
        device: of the ranks.
        role: of the worker.
    """
    cpus = settings.cluster.num_cpus_per_worker
    rank = {"GPU": 1.0} if device == "cuda" else {"CPU": cpus}
    return [
        {"CPU": cpus} | role_resources(settings, role),
        *({**rank} for _ in range(settings.worker.tensor_parallel)),
    ]


def role_resources(settings: Settings, role: str) -> dict[str, float]:
    """What ties a worker to the hosts of its role, if the settings say that there are such."""
    if settings.cluster.role_resources and role != "both":
        return {f"disagg_{role}": 1.0}
    return {}
