"""What befalls a simulated world: workers that die, links that break, clients that go away."""

import random
from collections.abc import Callable
from functools import partial
from typing import Protocol

from disagg.messages.identity import Incarnation
from disagg.testing.simulation.config import FaultKind, PlannedFault, SimulationConfig
from disagg.testing.simulation.links import ROUTER, SimulatedLinks
from disagg.testing.simulation.worker_model import WorkerModel


class FaultyWorld(Protocol):
    """What faults need of the world."""

    config: SimulationConfig
    workers: dict[str, WorkerModel]
    random: random.Random

    def draw(self, low: int, high: int) -> int:
        """A seeded random number, both ends included."""

    def later(self, delay_ms: int, event: Callable[[], None]) -> None:
        """Let something happen after a delay."""

    def unfinished(self) -> list[str]:
        """Requests that have not ended."""

    def cancel(self, request_id: str) -> None:
        """A client goes away."""

    def reset_prefix_caches(self) -> None:
        """An operator asks for it."""

    def start_worker(self, name: str, role: str) -> None:
        """A worker begins a new life."""

    def lose_session(self, worker: Incarnation) -> None:
        """The router notices that a worker is gone."""


class Faults:
    """Lets happen what the configuration plans, and as many random faults as it wants.

    Args:
        world: whom they befall.
        links: between its workers and router.
    """

    def __init__(self, world: FaultyWorld, links: SimulatedLinks) -> None:
        self._world = world
        self._links = links

    def plan(self) -> None:
        """Plan those that come at a time, random or given."""
        world, config = self._world, self._world.config
        for num, fault in (
            (config.num_kills, self._kill_one),
            (config.num_cuts, self._cut_one),
            (config.num_cancels, self._cancel_one),
            (config.num_resets, world.reset_prefix_caches),
        ):
            for _ in range(num):
                world.later(world.draw(50, 2_500), fault)
        for one in config.faults:
            if one.at_ms is not None:
                world.later(one.at_ms, partial(self._suffer, one))

    def before_event(self, number: int) -> None:
        """Let happen what is planned for just before the event of that number."""
        for fault in self._world.config.faults:
            if fault.event == number and fault.at_ms is None:
                self._suffer(fault)

    def _suffer(self, fault: PlannedFault) -> None:
        workers = self._world.workers
        match fault.kind:
            case FaultKind.KILL:
                self.kill(fault.worker)
            case FaultKind.LOSE:
                self.kill(fault.worker, returns=False)
            case FaultKind.STALL:
                workers[fault.worker].stall(fault.stall_ms)
            case FaultKind.CUT:
                self._cut(fault.worker, fault.other)
            case FaultKind.EXPIRE:
                workers[fault.worker].expire_leases()
            case FaultKind.PREEMPT:
                workers[fault.worker].preempt()
            case FaultKind.CANCEL:
                for request_id in self._world.unfinished():
                    self._world.cancel(request_id)

    def _kill_one(self) -> None:
        self.kill(self._world.random.choice(sorted(self._world.workers)))

    def kill(self, name: str, *, returns: bool = True) -> None:
        """A worker dies; others notice it later, and it comes back with a new epoch."""
        world = self._world
        victim = world.workers[name]
        if not victim.alive:
            return
        victim.alive = False
        for other in (ROUTER, *world.workers):
            self._links.cut(name, other)
        world.later(world.draw(1, 50), lambda: self._notice_death(victim))
        if returns:
            world.later(world.draw(100, 800), lambda: world.start_worker(name, victim.role))

    def _notice_death(self, victim: WorkerModel) -> None:
        self._world.lose_session(victim.me)
        for worker in self._world.workers.values():
            if worker is not victim:
                worker.on_peer_lost(victim.me)

    def _cut_one(self) -> None:
        self._cut(*self._world.random.sample(sorted(self._world.workers), 2))

    def _cut(self, one: str, other: str) -> None:
        self._links.cut(one, other)
        workers = self._world.workers
        workers[one].on_peer_lost(workers[other].me)
        workers[other].on_peer_lost(workers[one].me)

    def _cancel_one(self) -> None:
        live = self._world.unfinished()
        if live:
            self._world.cancel(self._world.random.choice(live))
