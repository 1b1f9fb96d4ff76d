"""Block tables of every sequence in all groups, as one."""

from collections.abc import Callable, Collection, Hashable, Iterator, Set
from math import lcm
from typing import NamedTuple

from disagg.errors import InvariantViolation
from disagg.kv.blocks.block_pool import NULL_BLOCK, BlockPool
from disagg.kv.blocks.hits import CacheHit
from disagg.kv.blocks.prefix_cache import PrefixCache
from disagg.kv.kinds.manager import GroupManager
from disagg.kv.kinds.setting import GroupSetting
from disagg.kv.shapes.layout import KVCacheLayout


class GroupBlocks(NamedTuple):
    """Blocks of one KV cache group."""

    num_held: int
    """In tables of sequences; one that several share counts once."""
    num_cached: int
    """With a content that can be found, and in no table."""


def alignment_tokens(layout: KVCacheLayout) -> int:
    """Hits of the whole model are multiples of so many tokens."""
    return lcm(*(group.spec.block_tokens for group in layout.groups))


def create_managers(
    layout: KVCacheLayout,
    pool: BlockPool,
    *,
    max_model_tokens: int,
    max_step_tokens: int,
    steps_max: int,
    eagle_groups: Collection[int],
    num_lookahead_tokens: int,
) -> tuple[GroupManager, ...]:
    """One manager per group, of its group's kind; arguments as in ``KVCacheCoordinator``."""
    aligned = alignment_tokens(layout)
    return tuple(
        group.spec.create_manager(
            pool,
            GroupSetting(
                group.group,
                group.blocks_per_state,
                hash_block_tokens=layout.hash_block_tokens,
                alignment_tokens=aligned,
                max_model_tokens=max_model_tokens,
                max_step_tokens=max_step_tokens + num_lookahead_tokens,
                drops_last=group.group in eagle_groups,
                steps_max=steps_max,
                num_lookahead_tokens=num_lookahead_tokens,
            ),
        )
        for group in layout.groups
    )


class SequenceTables:
    """The managers' tables, changed for all groups together; who calls has checked the room.

    Args:
        managers: one per group.

    Attributes:
        moving: the managers whose tables drop blocks as their sequence grows.
    """

    def __init__(self, managers: tuple[GroupManager, ...]) -> None:
        self._managers = managers
        self.moving = tuple(m for m in managers if m.next_drop(0) is not None)

    def start(self, key: Hashable, hit: CacheHit | None, num_known: int, *, external: bool) -> None:
        """Begin the tables of a sequence: every group's hit is held before any group allocates."""
        for manager in self._managers:
            manager.adopt(key, hit.block_ids[manager.group] if hit else [], num_known)
        if external:
            for manager in self._managers:
                manager.grow_external(key, num_known)

    def grow(self, key: Hashable, num_tokens: int) -> int:
        """Give every table slots for ``num_tokens``; returns for how many all have room now."""
        for manager in self._managers:
            manager.grow(key, num_tokens)
        return min([manager.room_end(key) for manager in self._managers])

    def free(self, key: Hashable, drop: Callable[[Hashable, list[int]], None]) -> None:
        """End the tables of a sequence; ``drop`` takes key and blocks given up."""
        for manager in self._managers:
            manager.free(key, drop)

    def quiet_end(self, key: Hashable, num_scheduled: int, room_end: int) -> int:
        """Up to so many tokens no table changes: none is full, and none drops a block."""
        for manager in self.moving:
            drop = manager.next_drop(manager.tables[key].num_skipped)
            if drop is not None:
                room_end = min(room_end, max(drop, num_scheduled))
        return room_end

    def in_window_blocks(self, key: Hashable, num_tokens: int) -> tuple[list[tuple[int, int]], ...]:
        """Per group the (block index, block id) pairs a query at position num_tokens reads."""
        return tuple(manager.in_window_blocks(key, num_tokens) for manager in self._managers)

    def blocks(self, key: Hashable) -> tuple[list[int], ...]:
        """Per group the live table (do not change it): block ids, NULL_BLOCK out of window."""
        return tuple(manager.tables[key].blocks for manager in self._managers)

    def num_held(self, key: Hashable) -> tuple[int, ...]:
        """Per group the number of blocks a sequence holds (zeros if it has no tables)."""
        return tuple(m.tables[key].held if key in m.tables else 0 for m in self._managers)

    def all_blocks(self) -> Iterator[list[int]]:
        """The live tables of all sequences in all groups (do not change them)."""
        return (table.blocks for manager in self._managers for table in manager.tables.values())

    def count_blocks(self, cache: PrefixCache) -> tuple[GroupBlocks, ...]:
        """Per group the blocks in tables, and those besides that can be found; linear in them."""
        counts = []
        for manager in self._managers:
            held = set().union(*(table.blocks for table in manager.tables.values())) - {NULL_BLOCK}
            # Of a state the first block alone is in its group's index, whoever holds the others.
            group = manager.group
            num_idle = cache.num_found(group) - cache.num_found_among(group, held)
            counts.append(GroupBlocks(len(held), num_idle * manager.blocks_per_state))
        return tuple(counts)

    def check(self, keys: Set[Hashable]) -> None:
        """Verify the tables of the sequences ``keys``; raises InvariantViolation."""
        group_of: dict[int, int] = {}
        for manager in self._managers:
            for block in {b for t in manager.tables.values() for b in t.blocks} - {NULL_BLOCK}:
                if group_of.setdefault(block, manager.group) != manager.group:
                    raise InvariantViolation(f"block {block} is in tables of two groups")
        for manager in self._managers:
            manager.check(keys)
