"""What each worker gets of the hosts and GPUs that Ray has."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.cluster.ray_cluster import num_workers
from disagg.config import Settings
from disagg.workers.options import AUTO


@dataclass(frozen=True, slots=True)
class Placement:
    """The same for every worker.

    Attributes:
        device: cpu or cuda.
        num_gpus: GPUs that Ray counts for a worker.
        workers_per_gpu: so many share one.
        workers_per_host: so many share a host, where Ray spreads them evenly.
    """

    device: str
    num_gpus: float
    workers_per_gpu: int
    workers_per_host: int


def has_room(settings: Settings, resources: Mapping[str, float]) -> bool:
    """Whether hosts for all workers have joined.

    Args:
        settings: how many workers, and the resources of each.
        resources: of all hosts together, as ``ray.cluster_resources()`` lists them.
    """
    cluster = settings.cluster
    asked = {"CPU": num_workers(settings) * cluster.num_cpus_per_worker}
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
    if device == "cuda" and settings.worker.tensor_parallel > 1:
        share = settings.worker.tensor_parallel  # a GPU for each rank
    return Placement(
        device=device,
        num_gpus=share,
        workers_per_gpu=max(1, int(1 / share)) if share else 1,
        workers_per_host=math.ceil(count / num_hosts),
    )
