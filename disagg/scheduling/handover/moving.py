"""Decodes that go on at another worker, as this one is about to end."""

from disagg.kv.transfer_plan import first_blocks, moved_blocks
from disagg.messages.session import EndReason
from disagg.messages.submit import Role
from disagg.scheduling.handover.prefill_side import PrefillSide
from disagg.scheduling.handover.worker_state import WorkerState
from disagg.scheduling.parts import Parts
from disagg.scheduling.sequence import Phase, Sequence

TIME_OVER = "the worker's time to drain is over"


class Moving:
    """Keeps the KV of a decode under a lease that nobody reads yet.

    The router names another worker, which takes the lease over as it does one whose decode worker
    was lost: so nothing is computed again, not even the rest of a block.
    """

    def __init__(self, worker: WorkerState, prefill_side: PrefillSide, parts: Parts) -> None:
        self._kv, self._limits = worker.kv, worker.limits
        self._batcher, self._generations = worker.batcher, worker.generations
        self._leases, self._counters = worker.leases, worker.counters
        self._prefill_side, self._parts = prefill_side, parts

    def move_all(self, now_ms: int) -> None:
        """Move what decodes, as soon as no step is in flight; end everything else."""
        for seq in list(self._generations.sequences.values()):
            if not self._can_move(seq):
                self._parts.end(seq, EndReason.DRAINING, TIME_OVER)
            elif not self._batcher.num_in_flight:
                self._move(now_ms, seq)

    def end_all(self) -> None:
        """End whatever there was no time to move."""
        for seq in list(self._generations.sequences.values()):
            self._parts.end(seq, EndReason.DRAINING, TIME_OVER)

    def _can_move(self, seq: Sequence) -> bool:
        """Whether it decodes here, so that all its tokens but the last have their KV here."""
        decodes = seq.phase is Phase.RUNNING and seq.role is not Role.PREFILL
        has_begun = seq.num_tokens > seq.num_prompt_tokens or seq.role is Role.DECODE
        return self._limits.take_over_ms > 0 and decodes and has_begun

    def _move(self, now_ms: int, seq: Sequence) -> None:
        """End a decode of which no step is in flight, and keep its KV for ``take_over_ms``."""
        num_tokens, managers = seq.num_computed, self._kv.managers
        if seq.num_uncomputed != 1:  # it was preempted, and computes again
            self._generations.end(seq, EndReason.DRAINING, TIME_OVER)
            return
        first = first_blocks(managers, (0,) * len(managers), num_tokens)
        blocks = moved_blocks(managers, seq.key, num_tokens, first)
        last = seq.request.token_ids[-1]
        self._leases.keep(now_ms, seq.key, self._prefill_side, first, blocks, num_tokens, last)
        self._counters.add("sequences_kept")
        self._generations.end(seq, EndReason.DRAINING, TIME_OVER, num_tokens)
