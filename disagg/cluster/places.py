"""Where the workers are: hosts looked at, one chosen for each worker, moves when they change."""

import math
import time
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import RayError

from disagg.cluster.placement import has_room
from disagg.cluster.spread import (
    RayHost,
    Seat,
    choose_host,
    describe_shortage,
    find_hosts,
    find_move,
)
from disagg.cluster.supervised import Supervised, last_line
from disagg.cluster.worker_plans import WorkerPlans
from disagg.config import Settings
from disagg.errors import ExpiredError

_POLL_S = 0.5
_HOSTS_WAIT_S = 60.0
"""Hosts join while this starts; where more are made on demand they come later."""
_SETTLE_S = 20.0
"""Before a worker moves to another host, that has been the better one for so long."""


class Places:
    """The hosts of the cluster, and which worker is on which.

    Attributes:
        hosts: that lived at the last look, without those that Ray drains.
        draining: when each of those is to be free, by node id; 0: no time is known.
    """

    def __init__(self) -> None:
        self.hosts: list[RayHost] = []
        self.draining: dict[str, float] = {}
        self._move: tuple[str, str] | None = None
        self._move_since_s = 0.0

    def look(self, plans: WorkerPlans) -> None:
        """See which hosts live; what workers get of them is divided anew.

        Raises:
            ExpiredError: this host is none of them.
        """
        try:
            nodes = ray.nodes()  # type: ignore[no-untyped-call]
        except (RayError, RuntimeError, OSError) as error:
            raise ExpiredError(
                f"Ray's head does not answer: {last_line(error)}", param="cluster.ray_address"
            ) from error
        own = ray.get_runtime_context().get_node_id()
        if not any(node["NodeID"] == own and node["Alive"] for node in nodes):
            raise ExpiredError(
                "this host does not belong to the Ray cluster any more: its head has gone or is"
                " another one",
                param="cluster.ray_address",
            )
        plans.divide(nodes)
        self.draining = _find_draining()
        self.hosts = [one for one in find_hosts(nodes) if one.node_id not in self.draining]

    def find_drained(
        self, workers: Sequence[Supervised], now_s: float
    ) -> list[tuple[Supervised, float]]:
        """Workers on hosts that Ray drains, and for how many seconds each may go on at most.

        Ray does so before an autoscaler takes a host away, before a preemption it knows of, and by
        ``ray drain-node``.

        Args:
            workers: all.
            now_s: since the Unix epoch, as Ray's deadlines are.
        """
        found = []
        for worker in workers:
            there = worker.actor is not None and worker.leaving is None
            if there and worker.node_id in self.draining:
                deadline_s = self.draining[worker.node_id] or math.inf
                found.append((worker, max(0.0, deadline_s - now_s)))
        return found

    def wait_for_hosts(
        self, settings: Settings, plans: WorkerPlans, confirm: Callable[[], None]
    ) -> None:
        """Wait a while: what workers get depends on how many hosts there are."""
        deadline = time.monotonic() + min(_HOSTS_WAIT_S, settings.cluster.start_timeout_s)
        while True:
            confirm()
            self.look(plans)
            all_there = len(self.hosts) >= settings.cluster.num_hosts
            if all_there and has_room(settings, ray.cluster_resources()):  # type: ignore[no-untyped-call]
                return
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def seat(self, worker: Supervised, workers: Sequence[Supervised], plans: WorkerPlans) -> None:
        """Choose the host of a worker that is to be created; "" where none has room.

        Ray then waits for room; its autoscaler sees what is missing, and makes a host for it.
        """
        if plans.starts_ranks(worker.worker_id):
            return  # Ray places those whose ranks it starts
        seats = _seats(workers, plans)
        (own,) = [each for each in seats if each.worker_id == worker.worker_id]
        worker.node_id = choose_host(own, seats, self.hosts, _placed(workers))
        if not worker.node_id:
            worker.say(f"finds no place: {describe_shortage(own, self.hosts)}")

    def find_move(
        self, workers: Sequence[Supervised], plans: WorkerPlans
    ) -> tuple[Supervised, RayHost] | None:
        """A worker that should go to another host, as hosts have become unequal, and the host.

        One at a time, and not at once.
        """
        now_s = time.monotonic()
        if any(w.leaving is not None or (w.node_id and not w.serves) for w in workers):
            self._move = None
            return None
        move = find_move(_seats(workers, plans), self.hosts, _placed(workers))
        if move != self._move:
            self._move, self._move_since_s = move, now_s
        if move is None or now_s - self._move_since_s < _SETTLE_S:
            return None
        self._move = None
        (worker,) = [w for w in workers if w.is_wanted and w.worker_id == move[0]]
        (host,) = [host for host in self.hosts if host.node_id == move[1]]
        return worker, host


def _find_draining() -> dict[str, float]:
    """Hosts that Ray drains, each with its deadline in seconds since the Unix epoch, or 0.

    Ray's own libraries ask so; there is no public way that needs no dashboard.
    """
    found = ray._private.state.state.get_draining_nodes()
    return {node_id: deadline_ms / 1000 for node_id, deadline_ms in found.items()}


def _placed(workers: Sequence[Supervised]) -> dict[str, str]:
    """Node id by worker id; of an old one that leaves by its actor's name."""
    return {w.key: w.node_id for w in workers if w.node_id}


def _seats(workers: Sequence[Supervised], plans: WorkerPlans) -> list[Seat]:
    """Of the workers that are tied to a host; Ray places those whose ranks it starts."""
    return [
        plans.seat(w.key, w.role)
        for w in workers
        if not w.is_wanted or not plans.starts_ranks(w.worker_id)
    ]
