"""Cached prefixes that other workers pull from this one."""

from disagg.kv.prefix_sharing import WantedPrefix
from disagg.messages.identity import Incarnation, LeaseRequest
from disagg.messages.peer import AskLease
from disagg.scheduling.handover.worker_state import WorkerState
from disagg.transfer.actions import LeaseCommitted, LeaseEnded


class PrefixLender:
    """Leases of blocks that are cached here, within the budget of hand-overs."""

    def __init__(self, worker: WorkerState) -> None:
        self._kv, self._prefixes = worker.kv, worker.prefixes
        self._budget, self._batcher = worker.budget, worker.batcher
        self._answers = worker.lease_answers

    def on_ask_lease(self, now_ms: int, sender: Incarnation, message: AskLease) -> None:
        """Match a cached prefix and hold it for the reader in one call, or refuse.

        Only blocks that nobody was promised are lent, within the budget, and none while an older
        request waits for memory here.
        """
        request = LeaseRequest(sender, message.key, message.number)
        if self._answers.repeat(request):
            return
        wanted = WantedPrefix(
            message.num_tokens,
            message.first_hash,
            message.hashes,
            message.first_lacked,
            message.alignment_tokens,
        )
        shared = None if self._batcher.preempted_waiting else self._prefixes.match(wanted)
        if shared is not None:
            blocks = [block for pairs in shared.blocks for _, block in pairs]
            pool = self._kv.pool
            cost = pool.num_leaving(blocks) + pool.slack.growth(blocks)
            fits = cost <= self._kv.num_available_blocks
            if fits and self._budget.take(request, len(blocks)):
                self._answers.open_sealed(now_ms, request, shared.blocks, shared.num_tokens, self)
                return
        self._answers.refuse(request)

    def lease_committed(self, event: LeaseCommitted) -> None:
        """The reader has committed: it has every block of the prefix."""
        self._budget.give_back(event.pull)

    def lease_ended(self, event: LeaseEnded) -> None:
        """The lease of a prefix is over without a commit."""
        self._budget.give_back(event.pull)
