"""How this worker's part of a generation waits for its turn, and how it ends."""

from disagg.messages.session import EndReason
from disagg.messages.submit import Role
from disagg.scheduling.admission import num_blocks_for
from disagg.scheduling.handover.decode_side import DecodeSide
from disagg.scheduling.handover.prefill_side import PrefillSide
from disagg.scheduling.handover.prefix_pull import PrefixPullSide
from disagg.scheduling.handover.worker_state import WorkerState
from disagg.scheduling.sequence import Sequence
from disagg.scheduling.tiers.tier_side import TierSide


class Parts:
    """Puts a part into the queue, and ends it at every side that may have something of it."""

    def __init__(
        self,
        worker: WorkerState,
        prefill_side: PrefillSide,
        decode_side: DecodeSide,
        prefix_pull: PrefixPullSide,
        tiers: TierSide,
    ) -> None:
        self._kv, self._limits = worker.kv, worker.limits
        self._batcher, self._generations = worker.batcher, worker.generations
        self._prefill_side, self._decode_side = prefill_side, decode_side
        self._prefix_pull, self._tiers = prefix_pull, tiers

    def queue(self, seq: Sequence) -> None:
        """Let a sequence that holds nothing wait for its turn."""
        num_queued = len(self._batcher.waiting) + len(self._prefill_side.backing_off)
        if num_queued >= self._limits.max_waiting and not seq.preempted:
            self.end(seq, EndReason.CAPACITY, "the queue is full")
        elif num_blocks_for(self._kv, seq.num_tokens) > self._kv.num_usable_blocks:
            self.end(seq, EndReason.REJECTED, "it has outgrown the pool")
        else:
            self._batcher.enqueue(seq)

    def end(
        self, seq: Sequence, reason: EndReason, message: str, *, tell_peer: bool = True
    ) -> None:
        """End this worker's part: give everything back, inform the peer and the router."""
        self._prefix_pull.end(seq.key, reason)
        self._tiers.end(seq.key)
        if seq.role is Role.PREFILL:
            self._prefill_side.end(seq, reason, message, tell_peer=tell_peer)
        elif seq.role is Role.DECODE:
            self._decode_side.end(seq, reason, message, tell_peer=tell_peer)
        else:
            self._generations.end(seq, reason, message)
