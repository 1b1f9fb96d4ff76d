"""The longest prefix that the pool and the tiers have together, in all groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.blocks.hits import CacheHit
from disagg.kv.kinds.manager import GroupManager

InTier = Callable[[int, bytes], bool]
"""Whether some tier has the block that a group calls so (`GroupManager.stored_values`)."""


@dataclass(frozen=True, slots=True)
class TieredPrefix:
    """A prefix that every group has in the pool or in tiers; valid until the next allocation.

    Attributes:
        num_tokens: its length, a boundary; 0 if there is none.
        hit: per group what the pool has of it, from the first block on that a query at
            ``num_tokens`` sees up to the first that comes from a tier; null before.
    """

    num_tokens: int
    hit: CacheHit


class TieredMatcher:
    """Looks up prefixes in pool and tiers together.

    At a boundary a group must have all that a query there sees, and nothing before it: all blocks
    of full attention, those in the window, the state. Its first blocks come from the pool, as far
    as they are cached there without a gap, the rest from tiers. A block that neither has rules out
    every boundary at which it is seen, so the next candidate ends before it; a shorter boundary
    sees no later block. The groups take turns until none of them shortens it any more.

    Args:
        managers: one per group.
    """

    def __init__(self, managers: Sequence[GroupManager]) -> None:
        self._alignment = managers[0].alignment_tokens
        self._num_groups = len(managers)
        self._nesting = [manager for manager in managers if manager.hits_nest]
        self._others = [manager for manager in managers if not manager.hits_nest]

    def find(self, hashes: Sequence[bytes], max_tokens: int, in_tier: InTier) -> TieredPrefix:
        """The longest prefix of at most ``max_tokens`` tokens; no effects."""
        own: list[list[int]] = [[] for _ in range(self._num_groups)]
        end = self._boundary(max_tokens)
        for manager in self._nesting:  # a shorter prefix of what they have is there as well
            reached, own[manager.group] = _reach(manager, hashes, end, in_tier)
            end = self._boundary(reached)
        agreed = False
        while end and not agreed:
            agreed = True
            for manager in self._others:
                reached, own[manager.group] = _reach(manager, hashes, end, in_tier)
                agreed = agreed and reached == end
                end = self._boundary(reached)
        for manager in self._nesting:
            del own[manager.group][manager.num_full_blocks(end) :]
        return TieredPrefix(end, CacheHit(0, tuple(own)))

    def _boundary(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._alignment


def _reach(
    manager: GroupManager, hashes: Sequence[bytes], num_tokens: int, in_tier: InTier
) -> tuple[int, list[int]]:
    """How far one group gets towards a boundary, and the table entries that the pool has of it."""
    if manager.skipped_tokens(num_tokens) >= num_tokens:
        return num_tokens, []
    chain, size = manager.chain(hashes), manager.block_tokens
    first = manager.first_block(num_tokens) // manager.blocks_per_state
    end = min(num_tokens // size, len(chain))
    own = [NULL_BLOCK] * (first * manager.blocks_per_state)
    place = first
    if manager.hits_nest:
        own = manager.pool.cache.leading_run(manager.group, chain, end)
        place = len(own)
    while place < end and (blocks := manager.cached_blocks(chain[place])):
        own += blocks
        place += 1
    group = manager.group
    while place < end and all(in_tier(group, one) for one in manager.stored_values(chain[place])):
        place += 1
    return place * size, own
