"""What an allocation takes, and whether it fits beside what others were promised."""

from collections.abc import Hashable, Iterable, Sequence

from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.blocks.hits import CacheHit
from disagg.kv.blocks.promises import PromiseBook
from disagg.kv.kinds.manager import GroupManager


class Admission:
    """Counts blocks over all groups before anything is taken.

    Args:
        managers: one per group.
        pool: the worker's pool.
    """

    def __init__(self, managers: Sequence[GroupManager], pool: BlockPool) -> None:
        self._managers = managers
        self._pool = pool
        self.promises = PromiseBook(pool, self._returning_blocks)

    def num_needed(
        self, key: Hashable, num_tokens: int, hit: CacheHit | None, num_known: int, capped: bool
    ) -> int:
        """Blocks that leave the free list if ``key`` grows to ``num_tokens``, the hit's included.

        Args:
            key: the sequence.
            num_tokens: tokens that need a slot.
            hit: prefix it will adopt.
            num_known: tokens known before the step, hit and external ones included.
            capped: count the most that a whole prompt holds at once.
        """
        if hit is None:
            return sum(
                [m.num_to_allocate(key, num_tokens, (), num_known, capped) for m in self._managers]
            )
        needed = 0
        for manager in self._managers:
            blocks = hit.block_ids[manager.group]
            needed += manager.num_to_allocate(key, num_tokens, blocks, num_known, capped)
            if blocks:
                needed += self._pool.num_leaving(manager.kept_hits(blocks, num_known))
        return needed

    def fits(self, key: Hashable, num_tokens: int, hit: CacheHit | None, num_known: int) -> bool:
        """Whether growing leaves everybody else's promise intact."""
        needed = self.num_needed(key, num_tokens, hit, num_known, False)
        if hit is not None and len(self.promises):
            kept = [m.kept_hits(hit.block_ids[m.group], num_known) for m in self._managers]
            needed += self.promises.sharing_cost(key, [b for blocks in kept for b in blocks])
        return needed <= self.promises.available(key)

    def admit(self, key: Hashable, num_tokens: int, hit: CacheHit | None) -> bool:
        """Promise what a whole prompt of ``num_tokens`` needs at its peak; all or nothing."""
        computed, fresh = hit.num_tokens if hit else 0, 0
        held: list[int] = []
        returning: list[int] = []
        for manager in self._managers:
            blocks = hit.block_ids[manager.group] if hit else []
            kept = manager.kept_hits(blocks, computed)
            remaining = max(0, manager.num_blocks(num_tokens) - len(blocks))
            fresh += max(0, min(remaining, manager.peak_blocks - len(kept)))
            held += kept
            returning += manager.returning(kept)
        return self.promises.give(key, fresh, num_tokens, hit, held, returning)

    def update(self, key: Hashable) -> None:
        """Fit the promise of a sequence that has changed to what it can still need."""
        num_tokens = self.promises.num_tokens(key)
        blocks = sum([manager.num_promised(key, num_tokens) for manager in self._managers])
        self.promises.update(key, blocks)

    def _returning_blocks(self, key: Hashable) -> Iterable[int]:
        for manager in self._managers:
            if key in manager.tables:
                table = manager.tables[key]
                yield from manager.returning(table.blocks[table.num_skipped :])
