"""What is written to tiers, and when: the write policies."""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from disagg.messages.kv_events import BlocksStored
from disagg.scheduling.actions import TierKey, WriteTier
from disagg.scheduling.handover.worker_state import WorkerState
from disagg.scheduling.tiers.copies import Copies, KeyedBlocks
from disagg.scheduling.tiers.index import TierIndex, TierSetting
from disagg.scheduling.tiers.seen_prompts import SeenPrompts

RETRY_MS = 1_000
"""A tier that took nothing of what it was given is given nothing for so long."""
STEPS_AHEAD = 4
"""With the policy ``eviction``, blocks that so many steps would evict have been written."""
SEEN_PER_BLOCK = 8
"""Chain values of prompts seen that are remembered, per block of the pool."""


class TierWrites:
    """Chooses blocks for tiers and writes them while they are cached.

    Only blocks that can be found are written, so nothing that a step has yet to compute or a
    transfer has yet to commit. Those of the policy ``eviction`` are the next that the pool would
    give up; after that they are the next again.
    What is wanted waits without a hold: what is evicted before its turn is not written.
    """

    def __init__(
        self,
        worker: WorkerState,
        tiers: Sequence[TierSetting],
        index: TierIndex,
        copies: Copies,
    ) -> None:
        kv, limits = worker.kv, worker.limits
        self._kv, self._counters, self._out = kv, worker.counters, worker.out
        self._tiers, self._index, self._copies = tiers, index, copies
        self._policies = {tier.write for tier in tiers}
        self._wanted: list[dict[TierKey, None]] = [{} for _ in tiers]
        self._refused: list[dict[TierKey, None]] = [{} for _ in tiers]
        """Not tried again only because they are the next to be evicted."""
        self._paused_until_ms = [0] * len(tiers)
        self._next_event = kv.events.next_seq
        self._seen = SeenPrompts(SEEN_PER_BLOCK * kv.num_usable_blocks)
        self._blocks_per_copy = limits.blocks_per_tier_copy_max
        num_blocks = int(limits.tier_write_share_max * kv.num_usable_blocks)
        self.blocks_max = max(1, num_blocks // max(1, len(tiers)))
        """Most blocks that are written to one tier at once, unless a single state has more. Each
        has its share: what one holds that stands still is lacking to no other."""
        step_blocks = sum(manager.num_blocks(limits.max_step_tokens) for manager in kv.managers)
        self._num_ahead = min(STEPS_AHEAD * step_blocks, kv.num_usable_blocks)

    def prompt(self, hashes: Sequence[bytes]) -> None:
        """A prompt comes: what comes for the second time is wanted from now on."""
        if "reuse" not in self._policies:
            return
        second = set(self._seen.prompt(hashes))
        for manager in self._kv.managers if second else ():
            values = [value for value in manager.chain(hashes) if value in second]
            self._want("reuse", manager.group, values)

    def pump(self, now_ms: int) -> None:
        """Write what is wanted, as much as may be written at once."""
        self._look_at_events()
        for number, tier in enumerate(self._tiers):
            if now_ms < self._paused_until_ms[number]:
                continue
            if tier.write == "eviction":
                # No more than stay there until they are evicted, or writing would never end.
                ahead = self._next_evicted(min(self._num_ahead, tier.blocks_max // 2))
                refused = self._refused[number]
                self._wanted[number] = {
                    key: None
                    for key in ahead
                    if key not in refused and not self._has_all(number, *key)
                }
            while self._copies.has_room(number, writes=True):
                blocks = self._take(number)
                if not blocks:
                    break
                last = tier.write == "eviction"
                copy = self._copies.begin(now_ms, number, blocks, writes=True, evict_first=last)
                self._out.add(WriteTier(copy.copy_id, tier.name, blocks))

    def on_written(
        self,
        now_ms: int,
        copy_id: int,
        stored: Collection[TierKey],
        evicted: Collection[TierKey],
    ) -> None:
        """A copy into a tier has ended: ``stored`` is there now, ``evicted`` no more."""
        copy = self._copies.end(now_ms, copy_id)
        name = self._tiers[copy.tier].name
        if copy.tier in self._index.closed:
            return  # it is emptied next
        self._index.add(copy.tier, stored)
        self._index.remove(copy.tier, evicted)
        self._counters.add(f"tier_blocks_written_{name}", len(stored))
        refused = [key for key, _ in copy.blocks if not self._index.has(copy.tier, key)]
        if refused:
            self._counters.add(f"tier_blocks_refused_{name}", len(refused))
            self._refused[copy.tier].update(dict.fromkeys(refused))
            _keep_newest(self._refused[copy.tier], self._kv.num_usable_blocks)
        if not stored:
            self._paused_until_ms[copy.tier] = now_ms + RETRY_MS

    # -- inside -------------------------------------------------------------------------------

    def _look_at_events(self) -> None:
        """What can be found since the last time."""
        batch = self._kv.events.since(self._next_event)
        self._next_event = self._kv.events.next_seq
        if batch is None:
            self._counters.add("tier_events_missed")
            return
        for event in batch.events if self._policies != {"eviction"} else ():
            if isinstance(event, BlocksStored):
                self._want("publish", event.group, event.hashes)
                if "reuse" in self._policies:
                    self._want("reuse", event.group, self._seen.computed(event.hashes))

    def _want(self, policy: str, group: int, values: Iterable[bytes]) -> None:
        for number, tier in enumerate(self._tiers):
            if tier.write == policy:
                wanted = self._wanted[number]
                wanted.update(dict.fromkeys([(group, value) for value in values]))
                _keep_newest(wanted, self._kv.num_usable_blocks)  # others are long evicted

    def _next_evicted(self, num_blocks: int) -> Iterable[TierKey]:
        """What allocating so many may evict, but for what follows the first block of a state."""
        pool, num_groups = self._kv.pool, len(self._kv.managers)
        for block in pool.next_evicted(num_blocks):
            content = pool.cache.content(block)
            if content is not None and content[0] < num_groups:
                yield content

    def _take(self, tier: int) -> KeyedBlocks:
        """The blocks of one copy, out of what is wanted: cached, and not in the tier."""
        wanted, found = self._wanted[tier], list[tuple[TierKey, int]]()
        taken = list[TierKey]()
        room = self.blocks_max - self._copies.num_blocks(tier)
        for group, value in wanted:
            if len(found) >= min(room, self._blocks_per_copy):
                break
            manager = self._kv.managers[group]
            blocks = manager.cached_blocks(value)
            if blocks and not self._has_all(tier, group, value):
                too_many = len(found) + len(blocks) > room
                if too_many and (found or room < self.blocks_max):
                    break
                names = [(group, name) for name in manager.stored_values(value)]
                found += zip(names, blocks, strict=True)
            taken.append((group, value))
        for key in taken:
            del wanted[key]
        return tuple(found)

    def _has_all(self, tier: int, group: int, value: bytes) -> bool:
        """Whether a tier has all blocks under a chain value, or is about to."""
        return all(
            self._index.has(tier, key) or self._copies.is_writing(tier, key)
            for key in [(group, one) for one in self._kv.managers[group].stored_values(value)]
        )


def _keep_newest(keys: dict[TierKey, None], num_keys: int) -> None:
    # All at once: to find the first key steps over all that were deleted before it.
    for key in list(islice(keys, max(0, len(keys) - num_keys))):
        del keys[key]
