"""The one pool of blocks of a worker: who holds what, what is free, what is cached."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from types import MappingProxyType

from disagg.errors import ConfigError, InvariantViolation
from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.blocks.free_blocks import UncachedBlocks
from disagg.kv.blocks.prefix_cache import PrefixCache
from disagg.kv.blocks.residency import BlockResidency
from disagg.kv.blocks.slack import Slack
from disagg.messages.kv_events import AllCleared, BlocksRemoved, BlocksStored, KVEvent

NULL_BLOCK = 0
"""Placeholder for blocks outside the window: in the tensor, never allocated."""


class BlockPool:
    """Blocks 1 .. num_blocks-1, counted by holders.

    A block is held (by requests' block tables through ``allocate``/``touch``/``release``, or by
    named holders), or free. Free blocks with a cached content are found and held again until
    they are evicted, in the policy's order. Only dropping the last hold frees a block.

    Bulk operations work on lists of ints at C speed; there is no object per block. Most blocks
    have one hold, which is not written down: a block is held if it is private (held, without a
    cached content), or cached and not free; ``_more_holds`` counts those beyond the first. Misuse
    that would cost a look at every block (releasing a free block) is found by ``check``.

    Args:
        num_blocks: blocks in the tensor, the null block included.
        num_groups: KV cache groups; the cache has one index per group.
        emit: receives the KV events in order.
        policy: what is cached, and what is evicted first.

    Attributes:
        cache: what can be found in which block.
        slack: blocks kept back, as promises count on shared ones.
        residency: the times of the blocks that are observed, if any are.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        emit: Callable[[KVEvent], None] = lambda _: None,
        policy: CachePolicy = CachePolicy(),  # noqa: B008 (frozen)
    ) -> None:
        if num_blocks < 2:
            raise ConfigError("a pool needs at least two blocks", param="num_blocks")
        self.num_blocks = num_blocks
        self.num_groups = num_groups
        self._emit = emit
        self._more_holds: dict[int, int] = {}
        self._private = bytearray(num_blocks)
        self._uncached = UncachedBlocks(1, num_blocks)
        self._caches = policy.enabled
        self._cached_free = policy.eviction_order(self._uncached)
        every = policy.observe_every
        self.residency = BlockResidency(every, num_blocks) if every else None
        self.cache = PrefixCache([NULL_BLOCK, *sorted(self._uncached)], num_groups)
        self._holds: dict[Hashable, list[int]] = {}
        self.slack = Slack(self.num_holds)

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be allocated."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks without a holder, cached or not."""
        return len(self._uncached) + len(self._cached_free)

    # -- requests' holds (the tables are the managers') ---------------------------------------

    def allocate(self, num_blocks: int) -> list[int]:
        """Hold ``num_blocks`` free blocks once each, evicting cached ones if need be.

        Raises:
            InvariantViolation: fewer are free; callers count first.
        """
        num_uncached = len(self._uncached)
        if num_blocks <= num_uncached:
            taken = self._uncached.take(num_blocks)
        elif num_blocks <= self.num_free:
            taken = self._uncached.take(num_uncached)
            # Sorted: a sequence freed from its end backwards would come back block by block.
            taken += sorted(self._evict(num_blocks - num_uncached))
        else:
            raise InvariantViolation(f"{num_blocks} blocks asked for, {self.num_free} are free")
        if taken:
            self._set_private(taken, True)
        return taken

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add one hold to each block that a request found; a free one leaves the free list."""
        if not self._cached_free.has_all(block_ids):
            self._check_holdable(block_ids)
        self._touch(block_ids)
        self._cached_free.found(block_ids)
        if self.residency is not None:
            self.residency.found(block_ids)

    def _touch(self, block_ids: Sequence[int]) -> None:
        free = self._cached_free
        taken, held = [], block_ids
        if free.num_among(block_ids):
            taken = [block for block in block_ids if block in free]
            held = [block for block in block_ids if block not in free]
        free.remove(taken)
        more = self._more_holds
        if more.keys().isdisjoint(held):
            more.update(zip(held, repeat(1)))
        else:
            for block in held:
                more[block] = more.get(block, 0) + 1
        if self.slack.expected:
            self.slack.holds_changed(block_ids)

    def release(self, block_ids: list[int], *, evict_first: bool = False) -> int:
        """Take one hold off each block; returns how many became free.

        Of those, cached ones become the most recently freed in the order given, or with
        ``evict_first`` the next to be evicted.
        """
        more = self._more_holds
        freed = block_ids
        if more and not more.keys().isdisjoint(block_ids):
            freed = [block for block in block_ids if block not in more]
            for block in filter(more.__contains__, block_ids):
                more[block] -= 1
            for block in [block for block in block_ids if more.get(block) == 0]:
                del more[block]
        cached = freed
        if freed and self._has_private(freed):
            private = self._private
            cached = [block for block in freed if not private[block]]
            uncached = [block for block in freed if private[block]]
            self._set_private(uncached, False)
            self._uncached.add(uncached)
        if cached:
            self._cached_free.add(cached, evict_first=evict_first)
        if self.slack.expected:
            self.slack.holds_changed(block_ids)
        return len(freed)

    def next_evicted(self, num_blocks: int) -> list[int]:
        """The cached blocks that allocating ``num_blocks`` would evict, in this order."""
        return self._cached_free.oldest(num_blocks - len(self._uncached))

    def num_leaving(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free, that is, would leave the free list if touched."""
        return self._cached_free.num_among(block_ids)

    def _set_private(self, block_ids: list[int], private: bool) -> None:
        if len(block_ids) == 1:
            self._private[block_ids[0]] = private
        elif (side := self.cache.neighbours(block_ids)) is not None:
            self._private[side] = bytes((private,)) * len(block_ids)
        else:
            deque(map(self._private.__setitem__, block_ids, repeat(private)), maxlen=0)

    def _has_private(self, block_ids: list[int], all_of_them: bool = False) -> bool:
        """Whether some of these blocks are private, or with ``all_of_them`` every one."""
        if len(block_ids) == 1:
            return bool(self._private[block_ids[0]])
        side = self.cache.neighbours(block_ids)
        if side is None:
            flags = itemgetter(*block_ids)(self._private)
            return all(flags) if all_of_them else any(flags)
        if all_of_them:
            return self._private.find(False, side.start, side.stop) < 0
        return self._private.find(True, side.start, side.stop) >= 0

    # -- named holders ------------------------------------------------------------------------

    def hold(self, holder: Hashable, block_ids: Sequence[int]) -> None:
        """Add one hold per block for a new holder (a lease, an inbound transfer, a tier read).

        Raises:
            InvariantViolation: the holder exists, or a block is null, or free and not cached;
                nothing has changed then.
        """
        if holder in self._holds:
            raise InvariantViolation(f"holder {holder!r} exists already")
        self._check_holdable(block_ids)
        self._holds[holder] = list(block_ids)
        self._touch(block_ids)

    def add_to_hold(self, holder: Hashable, block_ids: Sequence[int]) -> None:
        """Add one hold per block for an existing holder; raises as ``hold`` does."""
        if holder not in self._holds:
            raise InvariantViolation(f"holder {holder!r} is unknown")
        self._check_holdable(block_ids)
        self._holds[holder] += block_ids
        self._touch(block_ids)

    def drop(self, holder: Hashable, *, evict_first: bool = False) -> int:
        """End all holds of a holder as ``release`` does; returns how many blocks became free.

        0 if the holder is unknown.
        """
        held = self._holds.pop(holder, None)
        return self.release(held, evict_first=evict_first) if held else 0

    def holders(self) -> Mapping[Hashable, Sequence[int]]:
        """Live view of the named holders and their blocks."""
        return MappingProxyType(self._holds)

    def num_holds(self, block: int) -> int:
        """Holds on a block, 0 if it is free."""
        if self._private[block] or (self.cache.has(block) and block not in self._cached_free):
            return 1 + self._more_holds.get(block, 0)
        return 0

    def _check_holdable(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if not self._private[block] and not self.cache.has(block):
                raise InvariantViolation(f"block {block} is null, or free and not cached")
        if len(set(block_ids)) != len(block_ids):
            raise InvariantViolation("a block is named twice")

    # -- the prefix cache ---------------------------------------------------------------------

    def publish(
        self,
        group: int,
        block_ids: list[int],
        hashes: Sequence[bytes],
        *,
        parent_hash: bytes | None,
        first_position: int,
        block_tokens: int,
        token_ids: Sequence[int] = (),
        deduplicate: bool = True,
    ) -> None:
        """Make consecutive held, full, finished blocks findable; emits what is new.

        With ``deduplicate`` a block whose value is cached already stays private; else both
        copies are cached and the older one is found first.
        """
        if not self._has_private(block_ids, all_of_them=True):
            raise InvariantViolation(f"a block of group {group} is published twice, or not held")
        if not self._caches:
            return
        runs, stored = self.cache.store(group, block_ids, hashes, deduplicate)
        if stored:
            self._set_private(stored, False)
            if self.residency is not None:
                self.residency.published(stored)
        for start, end in runs:
            self._emit(
                BlocksStored(
                    group,
                    tuple(hashes[start:end]),
                    hashes[start - 1] if start else parent_hash,
                    first_position + start * block_tokens,
                    block_tokens,
                    tuple(token_ids[start * block_tokens : end * block_tokens]),
                )
            )

    def clear_cache(self) -> int:
        """Forget all cached contents; held blocks stay held, free ones become uncached.

        Returns:
            How many blocks had a content that could be found.
        """
        forgotten = self.cache.clear()
        for block in forgotten:
            self._private[block] = block not in self._cached_free
        self._uncached.add(list(self._cached_free))
        self._cached_free.clear()
        if self.residency is not None:
            self.residency.forgotten(forgotten)
        self._emit(AllCleared())
        return len(forgotten)

    def _evict(self, num_blocks: int) -> list[int]:
        victims = self._cached_free.take(num_blocks)
        if self.residency is not None:
            self.residency.evicted(victims)
        self._take_out(victims)
        return victims

    def forget(self, block_ids: Sequence[int]) -> None:
        """Take cached blocks out of the cache that have exactly one hold; others stay."""
        alone = [b for b in block_ids if b not in self._more_holds and self.cache.has(b)]
        if self.residency is not None:
            self.residency.forgotten(alone)
        self._take_out(alone)
        for block in alone:
            self._private[block] = True

    def _take_out(self, block_ids: Sequence[int]) -> None:
        self._cached_free.gone(block_ids)
        for group, values in self.cache.take_out(block_ids).items():
            self._emit(BlocksRemoved(group, tuple(values)))

    # -- invariants ---------------------------------------------------------------------------

    def check(self, tables: Iterable[Iterable[int]] = ()) -> None:
        """Verify every invariant; ``tables`` are the requests' block tables.

        Raises:
            InvariantViolation: naming the first rule that does not hold.
        """
        counts: Counter[int] = Counter()
        for blocks in (*tables, *self._holds.values()):
            counts.update(blocks)
        counts.pop(NULL_BLOCK, None)
        held = {b: n for b in range(1, self.num_blocks) if (n := self.num_holds(b))}
        if counts != held or not held.keys() >= self._more_holds.keys():
            wrong = {b for b in {*counts, *held} if counts[b] != held.get(b, 0)}
            raise InvariantViolation(f"counts are not the sum of holders for blocks {wrong}")
        free = [*self._uncached, *self._cached_free]
        if len(set(free)) != len(free):
            raise InvariantViolation("a block is on the free list twice")
        if set(free) | held.keys() != set(range(1, self.num_blocks)):
            raise InvariantViolation("a block is neither held nor free, or is no block")
        if not held.keys().isdisjoint(free):
            raise InvariantViolation(f"held blocks {held.keys() & free} are free")
        private = [block for block, flag in enumerate(self._private) if flag]
        if any(map(self.cache.has, (*self._uncached, *private))):
            raise InvariantViolation("an uncached free or private block has a value")
        if not all(map(self.cache.has, self._cached_free)):
            raise InvariantViolation("a cached free block has no value")
        self._cached_free.check()
        self.cache.check()
        self.slack.check()
