"""What each worker of the settings is to be: its options, its actor's name, what Ray reserves."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from disagg.cluster.placement import place_workers, rank_bundles, role_resources
from disagg.cluster.spread import Seat
from disagg.cluster.worker_actors import ActorName, ActorNeeds, name_actor
from disagg.config import Settings, worker_options
from disagg.workers.options import WorkerOptions


class WorkerPlans:
    """Of one supervisor. Hosts and GPUs are divided anew with every look at the nodes.

    Args:
        settings: with as many workers as there are roles.
        worker_path: the workers' class.
        roles: of every worker by its id.

    Attributes:
        roles: of every worker by its id.
        options: of every worker by its id, but for its part of hosts and GPUs.
        names: of every worker's actor by its id.

    Raises:
        ConfigError: no usable checkpoint directory, or no router to register with.
    """

    def __init__(self, settings: Settings, worker_path: str, roles: Mapping[str, str]) -> None:
        self.roles = dict(roles)
        self._settings = settings
        self._worker_path = worker_path
        self.options = {one: worker_options(settings, one, role) for one, role in roles.items()}
        self.names = {each.worker_id: self._name(each) for each in self.options.values()}
        self.divide(())

    def divide(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Take hosts and GPUs as they are now.

        Args:
            nodes: as ``ray.nodes()`` lists them.
        """
        self._placement = place_workers(self._settings, nodes)

    def is_current(self, name: ActorName) -> bool:
        """Whether this actor is one that the settings ask for."""
        return self.names.get(name.worker_id) == name

    def starts_ranks(self, worker_id: str) -> bool:
        """Whether Ray starts a worker's ranks, near together, and so chooses its host."""
        options = self.resolve(worker_id)
        return options.tensor_parallel > 1 and options.tensor_parallel_backend == "ray"

    def resolve(self, worker_id: str) -> WorkerOptions:
        """Options of a worker with its part of hosts and GPUs."""
        return replace(
            self.options[worker_id],
            device=self._placement.device,
            workers_per_gpu=self._placement.workers_per_gpu,
            workers_per_host=self._placement.workers_per_host,
            tensor_parallel_backend=self._placement.rank_backend,
        )

    def needs(self, worker_id: str) -> ActorNeeds:
        """What Ray reserves for a worker."""
        options = self.resolve(worker_id)
        bundles = rank_bundles(self._settings, options.device, options.role)
        return ActorNeeds(
            self._settings.cluster.num_cpus_per_worker,
            self._placement.num_gpus,
            role_resources(self._settings, options.role),
            tuple(bundles) if self.starts_ranks(worker_id) else (),
        )

    def seat(self, key: str, role: str) -> Seat:
        """What a worker of a role takes of its host."""
        resources = {
            "CPU": self._settings.cluster.num_cpus_per_worker,
            "GPU": self._placement.num_gpus,
        }
        return Seat(key, role, resources | role_resources(self._settings, role))

    def _name(self, options: WorkerOptions) -> ActorName:
        cluster = self._settings.cluster
        given = {
            "num_cpus": cluster.num_cpus_per_worker,
            "num_gpus": cluster.num_gpus_per_worker,
            "resources": role_resources(self._settings, options.role),
            "path": self._worker_path,
        }
        return name_actor(options, given)
