"""A tier of the simulated world: blocks of symbols, kept by key, beyond the life of workers."""

from collections.abc import Mapping
from dataclasses import dataclass

from disagg.scheduling.actions import TierKey
from disagg.scheduling.tiers.index import TierSetting, WritePolicy
from disagg.testing.simulation.symbolic_engine import Cell


@dataclass(frozen=True, slots=True)
class SimulatedTier:
    """What kind of tier every worker has, or all of them share.

    Attributes:
        name: its name.
        write: when blocks are written to it.
        blocks_max: the block used least recently makes room for one more.
        shared: whether it is one store for all workers.
        slow_ms: nobody waits longer while nothing comes.
        copy_ms_max: each block is copied at a moment of its own until then.
        losses_per_mille: blocks that are not stored, and as many that do not come whole.
        stalls_per_mille: copies that take three times ``slow_ms`` longer.
    """

    name: str = "host"
    write: WritePolicy = "publish"
    blocks_max: int = 400
    shared: bool = False
    slow_ms: int = 200
    copy_ms_max: int = 30
    losses_per_mille: int = 0
    stalls_per_mille: int = 0

    def setting(self, store: "SymbolicStore") -> TierSetting:
        """As a worker that starts knows it."""
        known = tuple(store.blocks)
        return TierSetting(self.name, self.write, self.blocks_max, self.slow_ms, known)


class SymbolicStore:
    """The blocks of one tier, the least recently used first."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self.blocks: dict[TierKey, dict[int, Cell]] = {}

    def write(self, blocks: Mapping[TierKey, dict[int, Cell]]) -> tuple[TierKey, ...]:
        """Keep blocks; returns what had to go for them."""
        for key, cells in blocks.items():
            self.blocks.pop(key, None)
            self.blocks[key] = cells
        num_over = max(0, len(self.blocks) - self._blocks_max)
        evicted = tuple(self.blocks)[:num_over]
        for key in evicted:
            del self.blocks[key]
        return evicted

    def read(self, key: TierKey) -> dict[int, Cell] | None:
        """The cells of a block."""
        cells = self.blocks.pop(key, None)
        if cells is not None:
            self.blocks[key] = cells
        return cells
