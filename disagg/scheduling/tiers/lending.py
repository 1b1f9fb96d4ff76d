"""Prefixes that another worker pulls and a tier here has: loaded first, then lent."""

from collections.abc import Callable

from disagg.kv.sequence import KVSequence
from disagg.messages.identity import Incarnation, LeaseRequest
from disagg.messages.peer import AskLease, LeaseLoading, WithdrawLease
from disagg.scheduling.handover.prefix_lending import PrefixLender
from disagg.scheduling.handover.worker_state import WorkerState
from disagg.scheduling.tiers.loads import TierLoads
from disagg.transfer.actions import Send


class TierLending:
    """Requests for leases that wait until what tiers have of the prefix is in the pool.

    The reader waits as for any answer as long as more comes, and computes if nothing does; what was
    loaded stays in the cache. Only whole prefixes are loaded for others: where the reader has the
    beginning itself, chain values of the beginning were not sent, and what the pool has is lent.
    """

    def __init__(self, worker: WorkerState, lender: PrefixLender, loads: TierLoads) -> None:
        self._kv, self._answers = worker.kv, worker.lease_answers
        self._counters, self._out = worker.counters, worker.out
        self._lender, self._loads = lender, loads
        self._asked: dict[LeaseRequest, AskLease] = {}
        """Each holds a part of the budget of hand-overs, which bounds them."""

    def on_ask_lease(self, now_ms: int, sender: Incarnation, message: AskLease) -> None:
        """Answer now, or after a load; a repetition meanwhile is told how far that is."""
        request = LeaseRequest(sender, message.key, message.number)
        if request in self._asked:
            num_blocks = self._loads.num_fetched(request)
            self._out.add(Send(sender, LeaseLoading(message.key, message.number, num_blocks)))
            return
        if not self._answers.knows(request) and self._is_whole(message):
            num_tokens = min(
                message.num_tokens, len(message.hashes) * self._kv.layout.hash_block_tokens
            )
            # Events never carry its tokens, which nobody here knows: see `_is_whole`.
            sequence = KVSequence(("lent", request), [0] * num_tokens, list(message.hashes))
            self._asked[request] = message
            if self._loads.fetch(now_ms, request, sequence, num_tokens, self._fetched):
                return
            del self._asked[request]
        self._lender.on_ask_lease(now_ms, sender, message)

    def on_withdraw(self, sender: Incarnation, message: WithdrawLease) -> None:
        """The reader waits no longer."""
        self._end(lambda one: one == LeaseRequest(sender, message.key, message.number))

    def on_peer_lost(self, reader: Incarnation) -> None:
        """An incarnation is gone, with all its requests."""
        self._end(lambda one: one.reader == reader)

    # -- inside -------------------------------------------------------------------------------

    def _is_whole(self, message: AskLease) -> bool:
        kv = self._kv
        fits = message.num_tokens <= kv.max_model_tokens
        return message.first_hash == 0 and fits and not kv.events_with_tokens

    def _fetched(self, now_ms: int, request: LeaseRequest) -> None:
        """What tiers had has come, or not: lend what is there."""
        self._counters.add("tier_prefixes_loaded_to_lend")
        self._lender.on_ask_lease(now_ms, request.reader, self._asked.pop(request))

    def _end(self, is_over: Callable[[LeaseRequest], bool]) -> None:
        for request in [one for one in self._asked if is_over(one)]:
            del self._asked[request]
            self._loads.end_prefetch(request)
