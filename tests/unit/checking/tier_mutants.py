"""Workers with a rule of tiers taken away."""

from collections.abc import Collection

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.messages.identity import Incarnation, LeaseRequest
from disagg.messages.peer import AskLease
from disagg.messages.session import ResetPrefixCache, ToWorkerMessage
from disagg.scheduling.actions import WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.tiers.clearing import TierClearing
from disagg.scheduling.tiers.copies import Copies, Copy, KeyedBlocks
from disagg.scheduling.tiers.index import TierIndex
from disagg.scheduling.tiers.lending import TierLending
from disagg.scheduling.tiers.loads import TierLoad, TierLoads


class WritesHoldNothing(Copies):
    """What a tier copies out may be evicted and reused meanwhile."""

    holds_nothing = True

    def begin(
        self,
        now_ms: int,
        tier: int,
        blocks: KeyedBlocks,
        *,
        writes: bool,
        evict_first: bool = False,
    ) -> Copy:
        copy = super().begin(now_ms, tier, blocks, writes=writes, evict_first=evict_first)
        if writes == self.holds_nothing:
            self._pool.drop(copy.holder)
        return copy


class ReadsHoldNothing(WritesHoldNothing):
    """What a tier copies in goes back with the sequence that wanted it."""

    holds_nothing = False


class BelievesTheTier(TierLoads):
    """What did not come whole counts all the same."""

    def on_read(self, now_ms: int, copy_id: int, intact: Collection[bool]) -> None:
        super().on_read(now_ms, copy_id, [True] * len(intact))


class CountsWithTheFirst(TierLoads):
    """A load counts when its first block has come."""

    def _conclude(self, now_ms: int, load: TierLoad) -> None:
        if len(load.missing) < sum(map(len, load.reservation.lacks)):
            load.missing.clear()
        super()._conclude(now_ms, load)


class EmptiedWhileCopying(Copies):
    """Has a tier emptied at once, whatever is being copied to it."""

    def is_busy(self, tier: int) -> bool:
        return False


class FoundUntilEmptied(TierIndex):
    """What a tier has is found, read and written until it is emptied."""

    def is_open(self, tier: int) -> bool:
        return tier not in self.silent

    def close(self, tier: int) -> None:
        self.closed.add(tier)


class OpensWhatIsNotEmpty(TierClearing):
    """A tier that could not be emptied is used again, and keeps what it had under a key."""

    def on_cleared(self, name: str, error: str) -> None:
        super().on_cleared(name, "")


class PublishesAllTheSame(KVCacheCoordinator):
    """Sequences that had begun before a reset publish on."""

    def forget_prefixes(self) -> int:
        for sequence in self._sequences.values():
            sequence.request.publishes = True
        return self.pool.clear_cache()


class PullsAsPlanned(WorkerCore):
    """Who waited in the queue at a reset pulls from a worker that may not have heard of it."""

    def on_router_message(self, now_ms: int, message: ToWorkerMessage) -> list[WorkerAction]:
        plans = [(seq, seq.pull) for seq in self.sequences.values()]
        actions = super().on_router_message(now_ms, message)
        for seq, pull in plans if isinstance(message, ResetPrefixCache) else ():
            seq.pull = pull
        return actions


class LoadsOnceMore(TierLending):
    """Takes a repeated request for a new one."""

    def on_ask_lease(self, now_ms: int, sender: Incarnation, message: AskLease) -> None:
        self._asked.pop(LeaseRequest(sender, message.key, message.number), None)
        super().on_ask_lease(now_ms, sender, message)


class LendsBeforeItHolds(TierLoads):
    """A prefix that was loaded for another worker is findable as soon as its reads are planned."""

    def _read(self, now_ms: int, load: TierLoad) -> None:
        super()._read(now_ms, load)
        if load.fetched is not None and load.missing:
            load.missing.clear()
            self._conclude(now_ms, load)
