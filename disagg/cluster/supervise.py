"""Creates the worker actors, waits until they serve, and watches them."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from disagg.cluster.placement import (
    Placement,
    has_room,
    place_workers,
    rank_bundles,
    role_resources,
)
from disagg.cluster.spread import Seat, find_hosts, find_move, spread
from disagg.config import Settings, worker_options
from disagg.errors import ConfigError, ExpiredError
from disagg.workers.actor import WORKER_PATH, WorkerActor, WorkerState
from disagg.workers.options import WorkerOptions

Report = Callable[[str], None]

_POLL_S = 0.5
_HOSTS_WAIT_S = 60.0
"""Hosts join while this starts; where more are made on demand they come later."""
_SETTLE_S = 20.0
"""Before a worker moves to another host, that has been the better one for so long."""
_LOOK_S = 5.0
"""Hosts are looked at so often."""
_RECREATE_MIN_S = 1.0
_RECREATE_MAX_S = 30.0

log = logging.getLogger(__name__)


def plan_workers(settings: Settings, placement: Placement) -> list[WorkerOptions]:
    """Options of every worker in the settings, in its place.

    Raises:
        ConfigError: no usable checkpoint directory, or no router to register with.
    """
    cluster = settings.cluster
    counts = {
        "prefill": cluster.num_prefill,
        "decode": cluster.num_decode,
        "both": cluster.num_both,
    }
    return [
        replace(
            worker_options(settings, f"{role}-{i}", role),
            device=placement.device,
            workers_per_gpu=placement.workers_per_gpu,
            workers_per_host=placement.workers_per_host,
            tensor_parallel_backend=placement.rank_backend,
        )
        for role, count in counts.items()
        for i in range(count)
    ]


@dataclass(slots=True)
class _Supervised:
    options: WorkerOptions
    actor: Any
    asked: Any
    """The one answer that is outstanding."""
    node_id: str = ""
    """Where it is, or is to be; "" where Ray chooses."""
    leaving: Any = None
    """Its answer, when it has been asked to end so that it can start on another host."""
    left_by_s: float = 0.0
    group: Any = None
    """Ray's placement group of the worker and its ranks, where Ray starts them."""
    state: WorkerState | None = None
    down: bool = False
    recreate_at_s: float = 0.0
    recreate_delay_s: float = _RECREATE_MIN_S


class Supervisor:
    """The worker actors of one driver; they end with it. Not thread-safe.

    Workers are spread over the hosts, and one moves when hosts have become more unequal by two. Ray
    restarts an actor whose process ended; one that Ray gave up is created anew, with growing
    delays, for as long as this runs.
    """

    def __init__(
        self, settings: Settings, report: Report = log.info, worker_path: str = WORKER_PATH
    ) -> None:
        self._settings = settings
        self._report = report
        self._worker_path = worker_path
        self._placement = place_workers(settings, ())
        self._plans = plan_workers(settings, self._placement)
        self._workers: list[_Supervised] = []
        self._hurried = False
        self._look_at_s = 0.0
        self._move: tuple[str, str] | None = None
        self._move_since_s = 0.0

    @property
    def states(self) -> list[WorkerState]:
        """Last known state of every worker that has served."""
        return [worker.state for worker in self._workers if worker.state is not None]

    def start(self) -> None:
        """Create all actors and return when every worker serves.

        Raises:
            ConfigError: a worker cannot use its options.
            ExpiredError: not all serve after ``cluster.start_timeout_s``.
        """
        deadline = time.monotonic() + self._settings.cluster.start_timeout_s
        places = self._place()
        for options in self._plans:
            group = self._reserve(options)
            node_id = "" if group is not None else places.get(options.worker_id, "")
            worker = _Supervised(options, None, None, node_id=node_id, group=group)
            self._create(worker)
            self._workers.append(worker)
        names = ", ".join(options.worker_id for options in self._plans)
        self._report(f"starting workers {names}")
        while any(worker.state is None for worker in self._workers):
            self._poll(fatal=True)
            if time.monotonic() > deadline:
                missing = [w.options.worker_id for w in self._workers if w.state is None]
                raise ExpiredError(
                    f"workers {', '.join(missing)} do not serve after"
                    f" {self._settings.cluster.start_timeout_s:g} s{_shortage()}",
                    param="cluster.start_timeout_s",
                )

    def poll(self) -> None:
        """Look at every worker once, about half a second; report what changed."""
        self._poll(fatal=False)
        self._rebalance()

    def stop(self, *, drain: bool = False) -> None:
        """Stop all workers, within ``cluster.stop_timeout_s``, and end their actors.

        Args:
            drain: what goes on may end first, for ``worker.drain_timeout_ms``.
        """
        timeout_s = self._settings.cluster.stop_timeout_s
        drain_s = self._settings.worker.drain_timeout_ms / 1000 if drain else 0.0
        waiting = [worker.actor.stop.remote(timeout_s, drain_s) for worker in self._workers]
        deadline = time.monotonic() + drain_s + timeout_s
        while waiting and time.monotonic() < deadline and not self._hurried:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
        for worker in self._workers:
            ray.kill(worker.actor, no_restart=True)
            if worker.group is not None:
                remove_placement_group(worker.group)
        self._workers.clear()

    def hurry(self) -> None:
        """Let nothing that goes on end any more; for a signal handler, while `stop` runs."""
        self._hurried = True

    def _place(self) -> dict[str, str]:
        """Wait a while for the hosts: what workers get depends on how many there are.

        Returns:
            Node id by worker id; a worker that has no room yet has none.
        """
        settings = self._settings
        num_hosts = settings.cluster.num_hosts
        deadline = time.monotonic() + min(_HOSTS_WAIT_S, settings.cluster.start_timeout_s)
        while True:
            nodes = ray.nodes()  # type: ignore[no-untyped-call]
            hosts = find_hosts(nodes)
            all_there = len(hosts) >= num_hosts
            if all_there and has_room(settings, ray.cluster_resources()):  # type: ignore[no-untyped-call]
                break
            if time.monotonic() > deadline:
                if not all_there:
                    self._report(f"{len(hosts)} of {num_hosts} hosts have joined, going on")
                break
            time.sleep(_POLL_S)
        self._placement = place_workers(settings, nodes)
        self._plans = plan_workers(settings, self._placement)
        return spread(self._seats(), hosts, {})

    def _seats(self) -> list[Seat]:
        """Of the workers that are tied to a host; Ray places those whose ranks it starts."""
        cluster = self._settings.cluster
        return [
            Seat(
                options.worker_id,
                options.role,
                {"CPU": cluster.num_cpus_per_worker, "GPU": self._placement.num_gpus}
                | role_resources(self._settings, options.role),
            )
            for options in self._plans
            if not self._starts_ranks(options)
        ]

    def _rebalance(self) -> None:
        """Move a worker when hosts have become unequal, one at a time, and not at once."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_S
        if any(w.leaving is not None or w.down or w.state is None for w in self._workers):
            self._move = None
            return
        placed = {w.options.worker_id: w.node_id for w in self._workers}
        hosts = find_hosts(ray.nodes())  # type: ignore[no-untyped-call]
        move = find_move(self._seats(), hosts, placed)
        if move != self._move:
            self._move, self._move_since_s = move, now_s
        if move is None or now_s - self._move_since_s < _SETTLE_S:
            return
        (worker,) = [w for w in self._workers if w.options.worker_id == move[0]]
        (host,) = [host for host in hosts if host.node_id == move[1]]
        self._report(f"worker {move[0]} moves to {host.address}, where there are fewer")
        timeout_s = self._settings.cluster.stop_timeout_s
        drain_s = self._settings.worker.drain_timeout_ms / 1000
        worker.node_id, worker.asked, self._move = host.node_id, None, None
        worker.leaving = worker.actor.stop.remote(timeout_s, drain_s)
        worker.left_by_s = now_s + drain_s + timeout_s

    def _finish_move(self, worker: _Supervised) -> None:
        """Start a worker on its new host once it has ended on the old one."""
        done, _ = ray.wait([worker.leaving], timeout=0)
        if done or time.monotonic() > worker.left_by_s:
            ray.kill(worker.actor, no_restart=True)
            worker.leaving = None
            self._create(worker)

    def _starts_ranks(self, options: WorkerOptions) -> bool:
        """Whether Ray starts a worker's ranks, near together."""
        return options.tensor_parallel > 1 and options.tensor_parallel_backend == "ray"

    def _reserve(self, options: WorkerOptions) -> Any:
        """Room for a worker and its ranks, near together; None where it starts them itself."""
        if not self._starts_ranks(options):
            return None
        bundles = rank_bundles(self._settings, options.device, options.role)
        return placement_group(bundles, strategy="PACK")

    def _create(self, worker: _Supervised) -> None:
        """Give a worker an actor, in its group, on its host, or wherever there is room."""
        cluster, options = self._settings.cluster, worker.options
        strategy: Any = "SPREAD"
        if worker.group is not None:
            strategy = PlacementGroupSchedulingStrategy(
                worker.group, placement_group_bundle_index=0
            )
        elif worker.node_id:
            # Soft: where the host has gone, any other is better than none.
            strategy = NodeAffinitySchedulingStrategy(worker.node_id, soft=True)
        remote: Any = ray.remote(WorkerActor)
        worker.actor = remote.options(
            name=f"{options.worker_id}-{time.monotonic_ns():x}",
            num_cpus=cluster.num_cpus_per_worker,
            num_gpus=self._placement.num_gpus,
            resources=role_resources(self._settings, options.role),
            max_restarts=cluster.max_restarts,
            max_task_retries=0,
            scheduling_strategy=strategy,
        ).remote(options, self._worker_path)
        worker.asked = worker.actor.describe.remote()

    def _recreate(self, worker: _Supervised) -> None:
        """Create it anew, on the host that is best now."""
        if worker.group is None:
            hosts = find_hosts(ray.nodes())  # type: ignore[no-untyped-call]
            here = {host.node_id for host in hosts}
            others = {
                w.options.worker_id: w.node_id
                for w in self._workers
                if w is not worker and w.node_id in here
            }
            seats = [seat for seat in self._seats() if seat.worker_id == worker.options.worker_id]
            places = spread(seats, hosts, others)
            worker.node_id = places.get(worker.options.worker_id, worker.node_id)
        self._create(worker)
        worker.recreate_at_s = 0.0

    def _poll(self, *, fatal: bool) -> None:
        asked = {worker.asked: worker for worker in self._workers if worker.asked is not None}
        answered: Sequence[Any] = []
        began = time.monotonic()
        if asked:
            answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_POLL_S)
        for ref in answered:
            worker = asked[ref]
            worker.asked = None
            try:
                self._heard(worker, ray.get(ref), fatal=fatal)
            except ActorUnavailableError:
                self._lost(worker, "its process ended, Ray restarts it")
            except ActorDiedError as error:
                if fatal:
                    raise ConfigError(
                        f"worker {worker.options.worker_id} did not start: {_last_line(error)}"
                    ) from error
                self._gave_up(worker, _last_line(error))
            except RayError as error:
                self._lost(worker, _last_line(error))
        for worker in self._workers:
            if worker.leaving is not None:
                self._finish_move(worker)
            elif worker.asked is None and worker.recreate_at_s <= time.monotonic():
                if not worker.recreate_at_s:
                    worker.asked = worker.actor.describe.remote()
                else:
                    self._recreate(worker)
        time.sleep(max(0.0, _POLL_S - (time.monotonic() - began)))

    def _heard(self, worker: _Supervised, state: WorkerState, *, fatal: bool) -> None:
        if state.refused:
            if fatal:
                raise ConfigError(f"worker {state.worker_id}: {state.refused}")
            ray.kill(worker.actor, no_restart=True)
            self._gave_up(worker, state.refused)
            return
        if worker.state is None or worker.state.epoch != state.epoch:
            again = " again" if worker.state is not None else ""
            self._report(
                f"worker {state.worker_id} serves{again} on {state.address}"
                f" (pid {state.pid}, epoch {state.epoch})"
            )
            if worker.state is None or worker.state.summary != state.summary:
                self._report(f"worker {state.worker_id} takes {state.summary}")
        worker.state, worker.down, worker.recreate_delay_s = state, False, _RECREATE_MIN_S
        if worker.group is None:
            worker.node_id = state.node_id  # Ray may have started it elsewhere

    def _lost(self, worker: _Supervised, reason: str) -> None:
        if not worker.down:
            self._report(f"worker {worker.options.worker_id}: {reason}")
        worker.down = True

    def _gave_up(self, worker: _Supervised, reason: str) -> None:
        delay = worker.recreate_delay_s
        self._report(
            f"worker {worker.options.worker_id} is dead ({reason}); a new one in {delay:g} s"
        )
        worker.down = True
        worker.recreate_at_s = time.monotonic() + delay
        worker.recreate_delay_s = min(2 * delay, _RECREATE_MAX_S)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _shortage() -> str:
    """What the cluster has left, for the message about a worker that found no place."""
    try:
        resources: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    except RayError:
        return ""
    free = {name: value for name, value in resources.items() if ":" not in name}
    return f"; Ray has left: {', '.join(f'{k} {v:g}' for k, v in sorted(free.items()))}"
