"""The one admission of work that comes from elsewhere: `Reserve`, take-over and prefix pull."""

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.messages.identity import Incarnation
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.generations import Generations
from disagg.scheduling.limits import WorkerLimits
from disagg.transfer.reader.table import InboundTable

STUCK = "a READ from there is stuck"


class InboundAdmission:
    """Reasons for which nothing more may be read into this worker's memory now.

    Whether there is memory for it, and room in the budget of hand-overs, shows when it is taken.
    """

    def __init__(
        self,
        kv: KVCacheCoordinator,
        batcher: Batcher,
        generations: Generations,
        inbound: InboundTable,
        limits: WorkerLimits,
    ) -> None:
        self._quarantine_max = limits.quarantine_share_max * kv.num_usable_blocks
        self._batcher = batcher
        self._generations = generations
        self._inbound = inbound
        self._limits = limits

    @property
    def ready(self) -> bool:
        """Whether READs that may still land hold no more of the pool than they may."""
        return self._inbound.num_blocks_quarantined <= self._quarantine_max

    def refusal(self, owner: Incarnation) -> str:
        """Why nothing may come from an owner now; "" when it may."""
        if self._batcher.preempted_waiting:
            return "an older request waits for memory"
        if owner in self._inbound.peers_paused:
            return STUCK
        if self._generations.num_holding >= self._limits.max_sequences:
            return "too many sequences"
        if not self.ready:
            return "too many blocks are in quarantine"
        return ""
