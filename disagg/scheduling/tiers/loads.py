"""Prefixes on their way from tiers into the pool; after any miss, compute or pull.

A load never fails its generation. While it goes on the sequence holds its blocks and is in no step.
When all blocks came intact they count, and the sequence is computed from there. When one did not,
what came is kept in the cache, what did not is forgotten, and the sequence takes its place in the
queue again: it goes on from what all groups have then.

A decode worker *prefetches* while it waits for a hand-over: what its tiers have of the prompt
enters its cache, and what has come when its reservation is requested is not pulled. Nobody waits
for that.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.kv.blocks.hits import CacheHit, ExternalReservation
from disagg.kv.sequence import KVSequence
from disagg.kv.tiered_prefix import TieredMatcher
from disagg.messages.identity import LeaseRequest, RequestKey
from disagg.scheduling.actions import ReadTier, TierKey, ToRouter
from disagg.scheduling.handover.prefill_side import PrefillSide
from disagg.scheduling.handover.report import read_progress
from disagg.scheduling.handover.worker_state import WorkerState
from disagg.scheduling.sequence import Phase
from disagg.scheduling.sequence import Sequence as Generation
from disagg.scheduling.tiers.copies import Copies, KeyedBlocks
from disagg.scheduling.tiers.index import TierIndex, TierSetting

FAILED_LOADS_MAX = 3
"""Of one generation; then it is computed."""

Place = tuple[int, int]
"""Group and block index."""
Fetch = RequestKey | LeaseRequest
"""What a prefetch is for: a hand-over to this worker, or a pull by another one."""
Fetched = Callable[[int, Any], None]


@dataclass(slots=True, eq=False)
class TierLoad:
    """Blocks of a prefix that are read from tiers.

    Attributes:
        request: holds the blocks that they are read into.
        seq: the sequence that waits for them; None for a prefetch.
        fetched: takes time and name of a prefetch when it has ended by itself.
        reservation: what is taken; computing begins at its boundary.
        own_tokens: what the pool has by itself.
        missing: blocks that have not come.
        failed: those of them that will not.
    """

    request: KVSequence
    seq: Generation | None
    reservation: ExternalReservation
    own_tokens: int
    fetched: "Fetched | None" = None
    missing: set[Place] = field(default_factory=set)
    failed: set[Place] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """Blocks of one load that are read by one copy."""

    load: TierLoad
    tier: int
    blocks: KeyedBlocks
    places: tuple[Place, ...]


class TierLoads:
    """Sequences whose prefix is being read from tiers.

    Attributes:
        loads: by generation.
        prefetches: of generations that hold nothing yet, and for requests of other workers.
    """

    def __init__(
        self,
        worker: WorkerState,
        prefill_side: PrefillSide,
        tiers: Sequence[TierSetting],
        index: TierIndex,
        copies: Copies,
    ) -> None:
        self._kv, self._prefixes, self._batcher = worker.kv, worker.prefixes, worker.batcher
        self._limits, self._counters, self._out = worker.limits, worker.counters, worker.out
        self._budget, self._prefill_side = worker.budget, prefill_side
        self._tiers, self._index, self._copies = tiers, index, copies
        self._matcher = TieredMatcher(worker.kv.managers)
        self._waiting: list[deque[PlannedRead]] = [deque() for _ in tiers]
        """Per tier, in order of arrival; no more blocks than sequences hold."""
        self._under_way: dict[int, PlannedRead] = {}
        self.loads: dict[RequestKey, TierLoad] = {}
        self.prefetches: dict[Fetch, TierLoad] = {}
        self._short: tuple[RequestKey | None, int] = (None, 0)
        """Who lacked memory last, and how many blocks were available: nothing is looked up for it
        until there are more."""

    # -- beginning ----------------------------------------------------------------------------

    def reserve(self, seq: Generation, hit: CacheHit) -> bool:
        """Take the blocks for a sequence of whose prefix the tiers have more than the pool.

        False, and nothing has changed, where they have not, another worker has more still, or
        memory is lacking: a load is never waited for.
        """
        num_available = self._kv.num_available_blocks
        short_of, num_before = self._short
        if seq.num_failed_loads >= FAILED_LOADS_MAX:
            return False
        if short_of == seq.key and num_available <= num_before:
            return False
        prefix = self._matcher.find(seq.request.hashes, seq.num_tokens - 1, self._in_tier)
        num_pulled = seq.pull.num_tokens if seq.pull is not None else 0
        if prefix.num_tokens <= hit.num_tokens or prefix.num_tokens < num_pulled:
            return False
        reservation = self._prefixes.reserve(
            seq.request, prefix.num_tokens, seq.num_tokens, prefix.hit
        )
        if reservation is None:
            self._short = seq.key, num_available
            return False
        self.loads[seq.key] = TierLoad(seq.request, seq, reservation, hit.num_tokens)
        seq.phase = Phase.LOADING
        return True

    def begin(self, now_ms: int, seq: Generation) -> None:
        """Read the blocks of a sequence whose memory was just taken."""
        self._counters.add("tier_loads")
        self._read(now_ms, self.loads[seq.key])

    def prefetch(self, now_ms: int, seq: Generation) -> None:
        """Bring what tiers have of a prompt into the cache."""
        prompt = seq.request
        request = KVSequence(("prefetch", seq.key), prompt.token_ids, prompt.hashes)
        self.fetch(now_ms, seq.key, request, seq.num_prompt_tokens)

    def fetch(
        self,
        now_ms: int,
        name: Fetch,
        request: KVSequence,
        num_tokens_max: int,
        fetched: Fetched | None = None,
    ) -> bool:
        """Bring what tiers have of a prefix into the cache, if there is room for it now.

        It takes a part of the budget of hand-overs, and nothing that anybody was promised.

        Returns:
            Whether it was begun; ``fetched`` is called at its end then, unless it is ended from
            outside, and perhaps before this returns.
        """
        kv = self._kv
        if name in self.prefetches or self._batcher.preempted_waiting:
            return False
        prefix = self._matcher.find(request.hashes, num_tokens_max, self._in_tier)
        own = kv.find_longest_cache_hit(request, num_tokens_max).num_tokens
        if prefix.num_tokens <= own:
            return False
        num_tokens = prefix.num_tokens
        reservation = self._prefixes.reserve(request, num_tokens, num_tokens, prefix.hit)
        if reservation is None:
            return False
        if not self._budget.take(request.key, sum(kv.tables.num_held(request.key))):
            kv.free(request.key)
            return False
        self._counters.add("tier_prefetches")
        load = self.prefetches[name] = TierLoad(request, None, reservation, own, fetched)
        self._read(now_ms, load)
        return True

    def pump(self, now_ms: int) -> None:
        """Begin as many reads as may be under way."""
        for tier, waiting in enumerate(self._waiting):
            while waiting and self._copies.has_room(tier, writes=False):
                read = waiting.popleft()
                copy = self._copies.begin(now_ms, tier, read.blocks, writes=False)
                self._under_way[copy.copy_id] = read
                self._out.add(ReadTier(copy.copy_id, self._tiers[tier].name, read.blocks))

    # -- news ---------------------------------------------------------------------------------

    def on_read(self, now_ms: int, copy_id: int, intact: Collection[bool]) -> None:
        """A copy out of a tier has ended; ``intact`` says of each block whether it came whole."""
        copy, read = self._copies.end(now_ms, copy_id), self._under_way.pop(copy_id)
        lost = {place for place, good in zip(read.places, intact, strict=True) if not good}
        came = set(read.places) - lost
        keys = [key for key, _ in read.blocks]
        self._index.remove(
            copy.tier, [key for key, place in zip(keys, read.places, strict=True) if place in lost]
        )
        name = self._tiers[copy.tier].name
        self._counters.add(f"tier_blocks_read_{name}", len(came))
        self._counters.add(f"tier_blocks_missed_{name}", len(lost))
        load = read.load
        if self._goes_on(load):
            load.missing -= came
            load.failed |= lost
            self._show_progress(now_ms, load)
            self._conclude(now_ms, load)
        self.pump(now_ms)

    def give_up_on(self, now_ms: int, tier: int) -> None:
        """Nothing comes from a tier: whoever waits for it goes on without."""
        under_way = [read for read in self._under_way.values() if read.tier == tier]
        reads = [*self._waiting[tier], *under_way]
        self._waiting[tier].clear()
        for read in reads:
            read.load.failed |= read.load.missing.intersection(read.places)
            self._counters.add("tier_reads_given_up")
        for load in {id(read.load): read.load for read in reads}.values():
            if self._goes_on(load):
                self._conclude(now_ms, load)

    def give_up_all(self, now_ms: int) -> None:
        """Whoever waits for a tier takes its place in the queue again."""
        for tier in range(len(self._tiers)):
            self.give_up_on(now_ms, tier)

    def end(self, key: RequestKey) -> None:
        """The generation ends here; copies under way keep their blocks until they have ended."""
        self._forget(self.loads.pop(key, None))
        self.end_prefetch(key)

    def num_fetched(self, name: Fetch) -> int:
        """Blocks that have come for a prefetch that goes on."""
        load = self.prefetches[name]
        return sum(map(len, load.reservation.lacks)) - len(load.missing)

    def end_prefetch(self, key: Fetch) -> None:
        """What it was for begins, or ended: keep what has come, and hold nothing any more."""
        prefetch = self.prefetches.pop(key, None)
        if prefetch is not None:
            num_tokens = prefetch.reservation.num_external_tokens
            self._prefixes.publish_intact(prefetch.request, num_tokens, prefetch.missing)
            self._give_back(prefetch)

    # -- inside -------------------------------------------------------------------------------

    def _read(self, now_ms: int, load: TierLoad) -> None:
        """Plan the reads of all blocks that are lacked, and begin as many as may be."""
        reads: list[list[tuple[TierKey, int, Place]]] = [[] for _ in self._tiers]
        for manager, lacks in zip(self._kv.managers, load.reservation.lacks, strict=True):
            chain, size = manager.chain(load.request.hashes), manager.blocks_per_state
            for block_index, block in lacks:
                value = manager.stored_values(chain[block_index // size])[block_index % size]
                key, place = (manager.group, value), (manager.group, block_index)
                load.missing.add(place)
                tier = self._index.find(key)
                if tier is None:  # gone since it was found
                    load.failed.add(place)
                else:
                    reads[tier].append((key, block, place))
        num_max = self._limits.blocks_per_tier_copy_max
        for tier, blocks in enumerate(reads):
            for first in range(0, len(blocks), num_max):
                part = blocks[first : first + num_max]
                pairs = tuple((key, block) for key, block, _ in part)
                places = tuple(place for _, _, place in part)
                self._waiting[tier].append(PlannedRead(load, tier, pairs, places))
        self._conclude(now_ms, load)
        self.pump(now_ms)

    def _goes_on(self, load: TierLoad) -> bool:
        return load in (*self.loads.values(), *self.prefetches.values())

    def _conclude(self, now_ms: int, load: TierLoad) -> None:
        """All blocks have come, or failed to: start the sequence, or let it try anew."""
        if load.missing - load.failed:
            return
        seq, request, num_tokens = load.seq, load.request, load.reservation.num_external_tokens
        if load.failed:
            self._counters.add("tier_loads_failed")
            self._prefixes.publish_intact(request, num_tokens, load.failed)
        else:
            self._kv.commit_external(request.key)
            self._counters.add("tier_loaded_tokens", num_tokens - load.own_tokens)
        if seq is None:
            (name,) = (name for name, one in self.prefetches.items() if one is load)
            del self.prefetches[name]
            self._give_back(load)
            if load.fetched is not None:
                load.fetched(now_ms, name)
            return
        del self.loads[seq.key]
        if not load.failed:
            seq.starts_from(num_tokens)
            self._prefill_side.start(now_ms, seq)
            return
        self._kv.free(seq.key)
        seq.num_failed_loads += 1
        if seq.preempted:
            self._batcher.enqueue(seq)
        else:
            self._batcher.requeue(seq)

    def _give_back(self, prefetch: TierLoad) -> None:
        """What has come of a prefetch stays in the cache; nothing of it is held."""
        self._forget(prefetch)
        self._kv.free(prefetch.request.key)
        self._budget.give_back(prefetch.request.key)

    def _forget(self, load: TierLoad | None) -> None:
        """Reads that wait for their turn never begin."""
        for waiting in self._waiting if load is not None else ():
            left = [read for read in waiting if read.load is not load]
            waiting.clear()
            waiting.extend(left)

    def _show_progress(self, now_ms: int, load: TierLoad) -> None:
        """Show the router that it goes on."""
        if load.seq is not None and load.seq.shows_progress(now_ms, self._limits.progress_ms):
            num_read = sum(map(len, load.reservation.lacks)) - len(load.missing)
            key, reservation = load.seq.key, load.reservation
            self._out.add(ToRouter(read_progress(key, reservation, num_read, load.own_tokens)))

    def _in_tier(self, group: int, value: bytes) -> bool:
        return self._index.find((group, value)) is not None
