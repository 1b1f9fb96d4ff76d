"""The workers of a supervisor: which are wanted, which serve, and why others do not."""

import time
from collections.abc import Collection
from typing import Any

from disagg.cluster.fleet_report import FleetReport
from disagg.cluster.roles import own_role
from disagg.cluster.supervised import Report, Supervised
from disagg.cluster.turnover import Standing, find_next_to_leave
from disagg.cluster.worker_actors import ActorName
from disagg.cluster.worker_plans import WorkerPlans
from disagg.workers.actor import WorkerState


class Workforce:
    """What is known of all workers; no actor is asked or ended here. Not thread-safe.

    Args:
        plans: what the wanted workers are to be.
        report: takes a line whenever something changed.
        start_timeout_s: of a worker, before it is said that it does not serve.

    Attributes:
        workers: all, those that are to end among them.
        plans: what the wanted workers are to be.
    """

    def __init__(self, plans: WorkerPlans, report: Report, start_timeout_s: float) -> None:
        self.workers: list[Supervised] = []
        self.plans = plans
        self._report = report
        self._start_timeout_s = start_timeout_s

    @property
    def states(self) -> list[WorkerState]:
        """Last known state of every wanted worker that has served."""
        return [w.state for w in self.workers if w.is_wanted and w.state is not None]

    @property
    def all_serve(self) -> bool:
        """Whether every wanted worker answered last, with role and settings as they are."""
        return all(map(self._is_as_wanted, self.workers))

    @property
    def serving(self) -> dict[str, str]:
        """Role by id of the workers that serve, or end what they have begun."""
        return {
            w.worker_id: w.state.role
            for w in self.workers
            if w.state is not None and (w.serves or (w.leaving is not None and not w.is_wanted))
        }

    @property
    def waiting(self) -> dict[str, str]:
        """Why not, by id, of the wanted workers that do not serve."""
        return {w.worker_id: w.said for w in self.workers if w.is_wanted and w.said}

    @property
    def present(self) -> dict[str, str]:
        """Role by id of the workers that need not leave, those first that should stay."""
        there = [worker for worker in self.workers if worker.leaving is None]
        there.sort(
            key=lambda worker: (
                not worker.is_wanted,
                not (worker.serves or worker.is_unheard),
                own_role(worker.worker_id) != worker.role,
                int(worker.worker_id.rpartition("-")[2]),
            )
        )
        present: dict[str, str] = {}
        for worker in there:
            present.setdefault(worker.worker_id, worker.role)
        return present

    def describe(self) -> FleetReport:
        """How many workers are as they are to be, and known to a router; why others are not."""
        wanted = [worker for worker in self.workers if worker.is_wanted]
        missing = {w.worker_id: why for w in wanted if (why := self._why_not(w))}
        ended = tuple(w.worker_id for w in wanted if w.fault and not w.serves)
        return FleetReport(len(wanted) - len(missing), missing, ended)

    def add_found(self, name: ActorName, role: str, actor: Any, *, has_served: bool) -> None:
        """Take over a worker that runs already, with the role it has been given.

        Args:
            name: of its actor.
            role: that it has been given.
            actor: to be asked how it is.
            has_served: it hangs if it does not answer, or it drains; else it may still start.
        """
        worker = self._supervised(role, name)
        worker.actor = actor
        if has_served:
            worker.heard, worker.unknown_since_s = actor, time.monotonic()
        self.workers.append(worker)

    def want(self, plans: WorkerPlans) -> None:
        """Want the workers of these plans from now on; those that are missing are to be created."""
        self.plans = plans
        kept: set[str] = set()
        # Of two with one id, which a supervisor left that was ended, the current one stays.
        for worker in sorted(self.workers, key=lambda worker: not plans.is_current(worker.name)):
            worker_id = worker.worker_id
            worker.is_wanted = worker_id in plans.roles and worker_id not in kept
            if worker.is_wanted:
                worker.role = plans.roles[worker_id]
            kept.add(worker_id)
        new = [
            self._supervised(role, plans.names[one])
            for one, role in plans.roles.items()
            if one not in kept
        ]
        if new:
            self._report(f"starting workers {', '.join(each.worker_id for each in new)}")
        self.workers += new

    def find_next_to_leave(self, node_ids: Collection[str]) -> Supervised | None:
        """A worker whose settings have changed, or that is not wanted any more; None: not now.

        Args:
            node_ids: of the hosts there are.
        """
        standing = [
            Standing(
                f"{w.name}",
                is_wanted=w.is_wanted,
                is_current=w.actor is None or self.plans.is_current(w.name),
                serves=w.serves,
                is_leaving=w.leaving is not None,
                is_awaited=w.is_awaited,
                is_known=w.state is None or not w.state.unregistered,
                has_place=w.node_id in node_ids,
            )
            for w in self.workers
        ]
        name = find_next_to_leave(standing)
        return next((w for w in self.workers if str(w.name) == name), None)

    def _why_not(self, worker: Supervised) -> str:
        """Why a worker is not as it is to be; "" where it is."""
        if worker.state is None or not worker.serves:
            return worker.said or "it starts, or waits for a host with room"
        if not self._is_as_wanted(worker):
            return "it still has its last settings, or role"
        return worker.state.unregistered

    def _is_as_wanted(self, worker: Supervised) -> bool:
        return worker.serves_as_wanted and self.plans.is_current(worker.name)

    def _supervised(self, role: str, name: ActorName) -> Supervised:
        return Supervised(name, role, self._report, time.monotonic() + self._start_timeout_s)
