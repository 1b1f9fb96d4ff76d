"""The workers' actors in Ray: their names say which worker it is, with which settings."""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from disagg.cluster.head_store import head_answers
from disagg.workers.actor import WorkerActor
from disagg.workers.options import WorkerOptions

_PREFIX = "disagg-worker"
_DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True)
class ActorName:
    """Of one worker's actor.

    Attributes:
        worker_id: whose it is.
        digest: of all settings that it runs with, and of the version that reads them.
    """

    worker_id: str
    digest: str

    def __str__(self) -> str:
        return f"{_PREFIX}/{self.worker_id}/{self.digest}"

    @classmethod
    def parse(cls, text: str) -> "ActorName | None":
        """From Ray's name; None when it is another actor's."""
        prefix, _, rest = text.partition("/")
        worker_id, _, digest = rest.partition("/")
        return cls(worker_id, digest) if prefix == _PREFIX and digest else None


@dataclass(frozen=True, slots=True)
class ActorNeeds:
    """What Ray reserves for a worker.

    Attributes:
        num_cpus: of its own process.
        num_gpus: of its own process.
        resources: others, by name.
        bundles: of a placement group, where Ray starts the worker's ranks; else empty.
    """

    num_cpus: float
    num_gpus: float
    resources: Mapping[str, float]
    bundles: tuple[Mapping[str, float], ...] = ()


def name_actor(options: WorkerOptions, given: Mapping[str, Any]) -> ActorName:
    """The name of a worker's actor; the same for every role, which it may change.

    Args:
        options: as the settings say, before hosts and GPUs are divided among the workers.
        given: what else it depends on.
    """
    text = json.dumps(
        [asdict(options) | {"role": ""}, dict(given), _version()], sort_keys=True, default=str
    )
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
    return ActorName(options.worker_id, digest)


def find_actors() -> dict[ActorName, Any]:
    """Every worker's actor in the cluster, whoever created it and whether it runs yet."""
    found = {}
    for text in ray.util.list_named_actors():
        name = ActorName.parse(text)
        if name is None:
            continue
        try:
            found[name] = ray.get_actor(text)
        except ValueError:  # it has ended in between
            continue
    return found


def has_begun(actor: Any) -> bool:
    """Whether a worker's actor has been made, which it is once the worker serves.

    Ray's own libraries ask so; there is no public way that needs no dashboard.
    """
    with head_answers():
        found = ray._private.state.state.actor_table(actor._actor_id.hex())
    return bool(found) and found["State"] == "ALIVE"


def create_actor(
    name: ActorName,
    options: WorkerOptions,
    worker_path: str,
    needs: ActorNeeds,
    node_id: str,
    *,
    lasting: bool,
) -> Any:
    """Create a worker's actor, in a group of its own, on a host, or wherever there is room.

    Args:
        name: that nobody else has.
        options: of the worker.
        worker_path: its class.
        needs: what Ray reserves.
        node_id: the host; "" lets Ray choose.
        lasting: it outlives this process.

    Raises:
        ActorAlreadyExistsError: the name is taken, also for a moment after its owner was ended.
        ValueError: Ray takes no such needs.
    """
    lifetime = "detached" if lasting else None
    strategy: Any = "SPREAD"
    if needs.bundles:
        remove_group(name)
        bundles = [dict(bundle) for bundle in needs.bundles]
        group = placement_group(bundles, strategy="PACK", name=str(name), lifetime=lifetime)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    elif node_id:
        # Soft: where the host has gone, any other is better than none.
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=True)
    remote: Any = ray.remote(WorkerActor)
    try:
        return remote.options(
            name=str(name),
            lifetime=lifetime,
            num_cpus=needs.num_cpus,
            num_gpus=needs.num_gpus,
            resources=dict(needs.resources),
            max_restarts=0,  # the supervisor starts it again: it sees a crash loop, Ray does not
            max_task_retries=0,
            scheduling_strategy=strategy,
        ).remote(options, worker_path)
    except ValueError:
        remove_group(name)  # no worker is to come that would use it
        raise


def remove_left_groups(actors: Collection[ActorName]) -> None:
    """Give back what is reserved for workers without an actor.

    One may have ended, or its supervisor was killed before it had created it, and the next one may
    want a worker of another name there.

    Args:
        actors: that exist.
    """
    groups = ray.util.placement_group_table()
    for group in groups.values():
        name = ActorName.parse(group["name"])
        if name is not None and name not in actors and group["state"] != "REMOVED":
            remove_group(name)


def end_actor(name: ActorName, actor: Any) -> None:
    """End its process at once, and give back what was reserved for it."""
    ray.kill(actor, no_restart=True)
    remove_group(name)


def remove_group(name: ActorName) -> None:
    """Remove a worker's placement group, if it has one."""
    try:
        remove_placement_group(get_placement_group(str(name)))
    except ValueError:
        return


def describe_free() -> str:
    """What the cluster has left, for the message about a worker that does not begin."""
    try:
        resources: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    except RayError:
        return ""
    free = {name: value for name, value in resources.items() if ":" not in name}
    return f"; Ray has left: {', '.join(f'{k} {v:g}' for k, v in sorted(free.items()))}"


def _version() -> str:
    try:
        return version("disagg")
    except PackageNotFoundError:
        return ""
