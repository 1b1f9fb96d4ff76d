"""Copies between pool and tiers that are under way: which blocks they hold, and how long."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from disagg.errors import InvariantViolation
from disagg.scheduling.actions import TierKey
from disagg.scheduling.tiers.index import TierIndex, TierSetting

KeyedBlocks = tuple[tuple[TierKey, int], ...]


class Holds(Protocol):
    """Named holds on blocks (`disagg.kv.blocks.block_pool.BlockPool`)."""

    def hold(self, holder: Hashable, block_ids: Sequence[int]) -> None:
        """Hold blocks by name."""

    def drop(self, holder: Hashable, *, evict_first: bool = False) -> int:
        """End the holds of a name."""

    def num_holds(self, block: int) -> int:
        """Holds on a block, by name or not."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy that a shell was told to make; it holds its blocks until the shell reports it.

    Attributes:
        copy_id: as in its action.
        tier: number of the tier.
        writes: from the pool into the tier; else the other way.
        blocks: keys and block ids.
        began_ms: when.
        evict_first: its blocks were the next to be evicted, and are so again after it.
    """

    copy_id: int
    tier: int
    writes: bool
    blocks: KeyedBlocks
    began_ms: int
    evict_first: bool = False

    @property
    def holder(self) -> tuple[str, int]:
        """Its name as a holder of blocks."""
        return "tier-write" if self.writes else "tier-read", self.copy_id


class Copies:
    """Copies under way, in both directions, at most ``copies_max`` each per tier.

    A block that is copied must be neither freed nor reused before the copy has ended: a write
    would store what came after it, a read would land in what came after it. So a copy holds its
    blocks whatever becomes of the sequences that had them, and ends only when the shell says so.

    A tier from which nothing comes for its ``slow_ms`` while copies are under way is *silent*:
    nothing is asked of it until one of them has ended.
    """

    def __init__(
        self, pool: Holds, index: TierIndex, tiers: Sequence[TierSetting], copies_max: int
    ) -> None:
        self._pool = pool
        self._index = index
        self._tiers = tiers
        self._heard_ms = [0] * len(tiers)
        self._copies_max = copies_max
        self._copies: dict[int, Copy] = {}
        self._written: dict[int, set[TierKey]] = {}
        self._next_id = 0

    def has_room(self, tier: int, *, writes: bool) -> bool:
        """Whether one more copy may begin."""
        if not self._index.is_open(tier):
            return False
        under_way = sum(one.tier == tier and one.writes == writes for one in self._copies.values())
        return under_way < self._copies_max

    def begin(
        self,
        now_ms: int,
        tier: int,
        blocks: KeyedBlocks,
        *,
        writes: bool,
        evict_first: bool = False,
    ) -> Copy:
        """Hold the blocks of a copy that the shell is told of next."""
        copy = Copy(self._next_id, tier, writes, blocks, now_ms, evict_first)
        self._next_id += 1
        self._pool.hold(copy.holder, [block for _, block in blocks])
        self._copies[copy.copy_id] = copy
        if writes:
            self._written.setdefault(tier, set()).update(key for key, _ in blocks)
        return copy

    def end(self, now_ms: int, copy_id: int) -> Copy:
        """The shell touches the blocks no more.

        Raises:
            InvariantViolation: there is no such copy.
        """
        copy = self._copies.pop(copy_id, None)
        if copy is None:
            raise InvariantViolation(f"copy {copy_id} ended that never began")
        self._pool.drop(copy.holder, evict_first=copy.evict_first)
        if copy.writes:
            self._written[copy.tier].difference_update(key for key, _ in copy.blocks)
        self._heard_ms[copy.tier] = now_ms
        self._index.silent.discard(copy.tier)
        return copy

    def find_silent(self, now_ms: int) -> list[int]:
        """The tiers of which nothing has come for too long, and that were not silent before."""
        silent = {
            copy.tier
            for copy in self._copies.values()
            if now_ms - max(copy.began_ms, self._heard_ms[copy.tier])
            > self._tiers[copy.tier].slow_ms
        }
        new = sorted(silent - self._index.silent)
        self._index.silent |= silent
        return new

    def is_busy(self, tier: int) -> bool:
        """Whether a copy to or from a tier is under way."""
        return any(copy.tier == tier for copy in self._copies.values())

    def is_writing(self, tier: int, key: TierKey) -> bool:
        """Whether a block is on its way into a tier."""
        return key in self._written.get(tier, ())

    def num_blocks(self, tier: int) -> int:
        """Blocks that are being written to a tier."""
        return sum(len(c.blocks) for c in self._copies.values() if c.writes and c.tier == tier)

    def num_returning(self) -> int:
        """Blocks that become free without anybody's doing: tiers that answer copy them out."""
        return sum(
            self._pool.num_holds(block) == 1
            for copy in self._copies.values()
            if copy.writes and copy.tier not in self._index.silent
            for _, block in copy.blocks
        )
