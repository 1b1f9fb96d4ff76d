"""A worker's tiers: what they have, what is written to them, who waits for them."""

from collections.abc import Collection, Sequence

from disagg.kv.blocks.hits import CacheHit
from disagg.messages.identity import RequestKey
from disagg.messages.registration import TierInfo
from disagg.messages.session import PrefixCacheReset
from disagg.scheduling.actions import TierKey
from disagg.scheduling.handover.prefill_side import PrefillSide
from disagg.scheduling.handover.prefix_lending import PrefixLender
from disagg.scheduling.handover.worker_state import WorkerState
from disagg.scheduling.sequence import Sequence as Generation
from disagg.scheduling.tiers.clearing import TierClearing
from disagg.scheduling.tiers.copies import Copies
from disagg.scheduling.tiers.index import TierIndex, TierSetting
from disagg.scheduling.tiers.lending import TierLending
from disagg.scheduling.tiers.loads import TierLoad, TierLoads
from disagg.scheduling.tiers.writes import TierWrites


class TierSide:
    """Everything the core does with tiers; without tiers, nothing.

    Attributes:
        has_any: whether there are tiers.
        infos: what a router is told of them.
        index: what each tier has.
        copies: what is under way.
        writes: from the pool into tiers.
        lending: to workers that pull what tiers have.
    """

    def __init__(
        self,
        worker: WorkerState,
        prefill_side: PrefillSide,
        lender: PrefixLender,
        tiers: Sequence[TierSetting],
    ) -> None:
        self.has_any = bool(tiers)
        self.infos = tuple(TierInfo(tier.name, tier.blocks_max) for tier in tiers)
        self.index = TierIndex(tiers, worker.kv.events.append)
        worker.kv.events.read_tiers = self.index.stored
        self.copies = Copies(worker.kv.pool, self.index, tiers, worker.limits.tier_copies_max)
        worker.batcher.num_returning = self.copies.num_returning
        self.writes = TierWrites(worker, tiers, self.index, self.copies)
        self._loads = TierLoads(worker, prefill_side, tiers, self.index, self.copies)
        self.lending = TierLending(worker, lender, self._loads)
        self._clearing = TierClearing(worker.out, tiers, self.index, self.copies)

    @property
    def loads(self) -> dict[RequestKey, TierLoad]:
        """Sequences that wait for blocks from tiers, by generation."""
        return self._loads.loads

    def prompt(self, seq: Generation) -> None:
        """A generation was submitted."""
        if self.has_any:
            self.writes.prompt(seq.request.hashes)

    def reserve(self, seq: Generation, hit: CacheHit) -> bool:
        """Take the blocks for a sequence that is to be loaded; see `TierLoads.reserve`."""
        return self.has_any and self._loads.reserve(seq, hit)

    def begin(self, now_ms: int, seq: Generation) -> None:
        """Load a sequence whose blocks were just reserved."""
        self._loads.begin(now_ms, seq)

    def prefetch(self, now_ms: int, seq: Generation) -> None:
        """Bring what tiers have of a prompt that is handed over to this worker into its cache."""
        if self.has_any:
            self._loads.prefetch(now_ms, seq)

    def end_prefetch(self, key: RequestKey) -> None:
        """The hand-over begins: what has not come from tiers will be pulled."""
        self._loads.end_prefetch(key)

    def on_written(
        self,
        now_ms: int,
        copy_id: int,
        stored: Collection[TierKey],
        evicted: Collection[TierKey],
    ) -> None:
        """A copy into a tier has ended."""
        self.writes.on_written(now_ms, copy_id, stored, evicted)
        self.pump(now_ms)

    def on_read(self, now_ms: int, copy_id: int, intact: Collection[bool]) -> None:
        """A copy out of a tier has ended."""
        self._loads.on_read(now_ms, copy_id, intact)
        self.pump(now_ms)

    def clear(self, now_ms: int) -> None:
        """Forget what is in tiers; who waits for them waits for its turn again, and computes."""
        self._loads.give_up_all(now_ms)
        self._clearing.begin()

    def answer(self, answer: PrefixCacheReset) -> None:
        """Answer a reset once all tiers are empty."""
        self._clearing.answer(answer)

    def forget_answer(self, router: str) -> None:
        """Nobody waits for the answer to that router's reset any more."""
        self._clearing.forget_answer(router)

    def on_cleared(self, now_ms: int, tier: str, error: str) -> None:
        """A tier was emptied; with an error it stays closed."""
        self._clearing.on_cleared(tier, error)
        self.pump(now_ms)

    def pump(self, now_ms: int) -> None:
        """Begin what may be copied now: after each event that publishes blocks or ends a copy."""
        if self.has_any:
            self._clearing.pump()
            self._loads.pump(now_ms)
            self.writes.pump(now_ms)

    def tick(self, now_ms: int) -> None:
        """Give up on tiers that have become silent: whoever waits for them goes on without.

        What they are copying keeps its blocks until it has ended.
        """
        if self.has_any:
            for tier in self.copies.find_silent(now_ms):
                self._loads.give_up_on(now_ms, tier)
            self.pump(now_ms)

    def end(self, key: RequestKey) -> None:
        """A generation ends here; nothing if it is not being loaded."""
        self._loads.end(key)
