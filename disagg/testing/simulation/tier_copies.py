"""The copies between one simulated worker's pool and its tiers: block by block, at any moment."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from disagg.messages.identity import Incarnation
from disagg.scheduling.actions import ReadTier, TierKey, WorkerAction, WriteTier
from disagg.scheduling.core import WorkerCore
from disagg.testing.simulation.config import SimulationConfig
from disagg.testing.simulation.symbolic_engine import Cell, SymbolicMemory
from disagg.testing.simulation.symbolic_tier import SimulatedTier, SymbolicStore


class TierWorld(Protocol):
    """What the copies need of the world."""

    config: SimulationConfig
    now_ms: int

    def draw(self, low: int, high: int) -> int:
        """A seeded random number, both ends included."""

    def later(self, delay_ms: int, event: Callable[[], None]) -> None:
        """Let something happen after a delay."""

    def event(self, delay_ms: int, happen: Callable[[], None]) -> None:
        """The same, for what a planned fault may come before."""

    def store(self, worker: str, tier: SimulatedTier) -> SymbolicStore:
        """The blocks of one of the worker's tiers."""


class TierWorker(Protocol):
    """The worker that copies."""

    me: Incarnation
    alive: bool
    core: WorkerCore
    memory: SymbolicMemory


class TierCopies:
    """Carries out `WriteTier` and `ReadTier`.

    What is copied is what is in the block at that moment: a block that somebody else got too early
    is stored under a wrong key, or overwritten.
    """

    def __init__(
        self,
        world: TierWorld,
        worker: TierWorker,
        perform: Callable[[list[WorkerAction]], None],
    ) -> None:
        self._world = world
        self._worker = worker
        self._perform = perform

    def begin(self, action: WriteTier | ReadTier) -> None:
        """Copy each block at a moment of its own, then tell the core."""
        world = self._world
        tier = next(one for one in world.config.tiers if one.name == action.tier)
        store = world.store(self._worker.me.worker_id, tier)
        stalls = world.draw(1, 1000) <= tier.stalls_per_mille
        staged: dict[TierKey, dict[int, Cell]] = {}
        intact = [False] * len(action.blocks)
        last = 0
        for number, (key, block) in enumerate(action.blocks):
            delay = world.draw(0, tier.copy_ms_max) + stalls * 3 * tier.slow_ms
            last = max(last, delay)
            lost = world.draw(1, 1000) <= tier.losses_per_mille
            if isinstance(action, ReadTier):
                copy = partial(self._read, store, key, block, lost, intact, number)
            else:
                copy = partial(self._stage, staged, key, block, lost)
            world.later(delay, copy)
        world.event(last + 1, partial(self._done, action, store, staged, intact))

    def clear(self, name: str) -> None:
        """Drop what a tier has at some moment, then tell the core."""
        world = self._world
        tier = next(one for one in world.config.tiers if one.name == name)
        store = world.store(self._worker.me.worker_id, tier)
        delay = world.draw(0, tier.copy_ms_max)
        world.later(delay, store.blocks.clear)
        world.event(delay + 1, partial(self._cleared, name))

    def _cleared(self, name: str) -> None:
        if self._worker.alive:
            core, now_ms = self._worker.core, self._world.now_ms
            self._perform(core.on_tier_cleared(now_ms, name, ""))

    def _stage(
        self, staged: dict[TierKey, dict[int, Cell]], key: TierKey, block: int, lost: bool
    ) -> None:
        if not lost:
            staged[key] = dict(self._worker.memory.blocks[block])

    def _read(
        self,
        store: SymbolicStore,
        key: TierKey,
        block: int,
        lost: bool,
        intact: list[bool],
        number: int,
    ) -> None:
        cells = store.read(key)
        intact[number] = cells is not None and not lost
        found = list((cells or {}).items())
        self._worker.memory.blocks[block] = dict(found[: len(found) // 2] if lost else found)

    def _done(
        self,
        action: WriteTier | ReadTier,
        store: SymbolicStore,
        staged: dict[TierKey, dict[int, Cell]],
        intact: list[bool],
    ) -> None:
        """A worker that died meanwhile has stored nothing: writes are atomic."""
        if not self._worker.alive:
            return
        core, now_ms = self._worker.core, self._world.now_ms
        if isinstance(action, ReadTier):
            self._perform(core.on_tier_read(now_ms, action.copy_id, intact))
        else:
            evicted = store.write(staged)
            stored = tuple(staged)
            self._perform(core.on_tier_written(now_ms, action.copy_id, stored, evicted))
