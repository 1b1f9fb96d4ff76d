"""Prefix pulls into this worker: reserve, request, read, commit; after any failure, compute.

A pull never fails its generation. While it goes on the sequence holds its blocks for a bounded
time only; when it ends without a commit the sequence gives them back and takes its place in the
queue again, without a pull.
"""

from dataclasses import dataclass

from disagg.kv.blocks.hits import CacheHit, ExternalReservation
from disagg.kv.transfer_plan import first_blocks
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import AskLease, Offers
from disagg.messages.reports import TransferKind
from disagg.messages.submit import PullPlan
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.handover.prefill_side import PrefillSide
from disagg.scheduling.handover.report import (
    committed_report,
    failed_report,
    pulled_bytes,
    read_progress,
)
from disagg.scheduling.handover.worker_state import WorkerState
from disagg.scheduling.sequence import Phase, Sequence
from disagg.transfer.actions import (
    InboundCommitted,
    InboundDrained,
    InboundFailed,
    InboundPartial,
)

HASHES_MAX = 1 << 20
"""In one request; 32 MiB of them, half of what a gRPC message may have."""


@dataclass(slots=True)
class PrefixPull:
    """A sequence that waits for its prefix, and what is reserved for it."""

    seq: Sequence
    plan: PullPlan
    reservation: ExternalReservation
    own_tokens: int
    """What this worker's cache has by itself."""
    first_lacked: tuple[int, ...] = ()
    """Per group, position of the first token that was requested."""


class PrefixPullSide:
    """Sequences whose prefix is being pulled.

    Attributes:
        pulls: by generation.
    """

    def __init__(self, worker: WorkerState, prefill_side: PrefillSide) -> None:
        self._kv, self._prefixes = worker.kv, worker.prefixes
        self._batcher, self._counters, self._out = worker.batcher, worker.counters, worker.out
        self._admission = worker.admission
        self._inbound, self._requests = worker.inbound, worker.lease_requests
        self._parts_from = worker.parts_from
        self._prefill_side = prefill_side
        self._progress_ms = worker.limits.progress_ms
        self.pulls: dict[RequestKey, PrefixPull] = {}

    # -- beginning ----------------------------------------------------------------------------

    def reserve(self, seq: Sequence, hit: CacheHit) -> bool:
        """Take the blocks for a sequence whose prefix another worker has more of.

        False, and nothing has changed, where no pull is planned, the own hit is as long, nothing
        may come from that worker now, or memory for it is lacking: a pull is never waited for.
        """
        plan = seq.pull
        if plan is None:
            return False
        num_tokens = self._prefixes.boundary(min(plan.num_tokens, seq.num_tokens - 1))
        refusal = self._admission.refusal(plan.owner.incarnation)
        if num_tokens <= hit.num_tokens or refusal:
            seq.pull = None
            self._counters.add("prefix_pulls_skipped")
            return False
        reservation = self._prefixes.reserve(seq.request, num_tokens, seq.num_tokens)
        if reservation is None:
            return False
        self.pulls[seq.key] = PrefixPull(seq, plan, reservation, hit.num_tokens)
        seq.phase = Phase.PULLING_PREFIX
        seq.pull = None
        return True

    def ask(self, now_ms: int, seq: Sequence) -> None:
        """Request the lease of a sequence whose blocks were just reserved."""
        pull = self.pulls[seq.key]
        wanted = self._prefixes.wanted(seq.request, pull.reservation, pull.own_tokens)
        if len(wanted.hashes) > HASHES_MAX:
            self._give_up(seq.key, "too_long", "more hashes than a message takes")
            return
        self._counters.add("prefix_pulls")
        pull.first_lacked = wanted.first_lacked
        request = AskLease(
            seq.key,
            0,
            wanted.num_tokens,
            wanted.first_hash,
            wanted.hashes,
            wanted.first_lacked,
            wanted.alignment_tokens,
        )
        self._requests.ask(now_ms, pull.plan.owner.incarnation, request, self)

    def lease_granted(self, now_ms: int, owner: Incarnation, offers: Offers) -> None:
        """Begin the transfer, up to the boundary of the answer; the blocks after it go back first.

        Taken again, the prefix may have longer hits here than when the lease was requested: blocks
        that were requested and are cached by now are offered all the same, and not read.
        """
        key = offers.key
        pull = self.pulls[key]
        requested = pull.reservation.num_external_tokens
        num_tokens = offers.seal.num_tokens if offers.seal else 0
        if num_tokens > requested or self._prefixes.boundary(num_tokens) < num_tokens:
            self._give_up(key, "answer", f"no boundary: {num_tokens} tokens")
            return
        if num_tokens <= pull.own_tokens:
            self._give_up(key, "none", "the owner has no more of it")
            return
        if num_tokens < requested:
            self._kv.free(key)
            shorter = self._prefixes.reserve(pull.seq.request, num_tokens, pull.seq.num_tokens)
            if shorter is None:
                self._give_up(key, "memory", "no room for a shorter prefix")
                return
            pull.reservation = shorter
        lacks = pull.reservation.lacks
        parts = self._parts_from(owner, key, num_tokens, lacks, pull.first_lacked)
        if parts is not None and any(parts.unfilled):
            # It could be handed on, to a worker that would not know which part is unknown.
            self._give_up(key, "unequal", "the owner's blocks leave one of a window incomplete")
            return
        requested_from = first_blocks(self._kv.managers, pull.first_lacked)
        lacked_from = first_blocks(self._kv.managers, pull.reservation.hit_tokens)
        surplus = tuple(map(range, requested_from, lacked_from))
        self._inbound.begin(now_ms, key, owner, lacks, self, offers.lease_id, surplus, parts)
        self._inbound.on_offers(now_ms, owner, offers)

    def lease_refused(self, now_ms: int, key: RequestKey, cause: str, message: str) -> None:
        """There is no lease: compute the prefix."""
        self._give_up(key, cause, message)

    # -- news of the inbound transfer ---------------------------------------------------------

    def progressed(self, now_ms: int, key: RequestKey) -> None:
        """Prolong the request of the pull; show the router that it goes on."""
        self._requests.renew(now_ms, key)
        pull = self.pulls[key]
        if pull.seq.shows_progress(now_ms, self._progress_ms):
            num_read = self._inbound.num_blocks_read(key)
            progress = read_progress(key, pull.reservation, num_read, pull.own_tokens)
            self._out.add(ToRouter(progress))

    def committed(self, now_ms: int, event: InboundCommitted) -> None:
        """Publish the prefix; the sequence goes on after the boundary."""
        key = event.key
        pull = self.pulls.pop(key)
        report = committed_report(
            self._kv,
            key,
            pull.plan.owner.incarnation,
            TransferKind.PREFIX,
            pull.reservation,
            event.stats,
        )
        self._kv.commit_external(key)
        self._inbound.finish(key)
        self._requests.finished(key)
        pull.seq.hit_before_pull = pull.own_tokens
        pull.seq.starts_from(report.num_tokens)
        self._counters.add("prefix_pulls_committed")
        self._counters.add("prefix_pulled_bytes", pulled_bytes(report))
        self._out.add(ToRouter(report))
        self._prefill_side.start(now_ms, pull.seq)

    def partly_committed(self, now_ms: int, event: InboundPartial) -> None:
        """Some blocks did not arrive: keep the others, compute what is lacking."""
        self._counters.add("transfers_recovered")
        key = event.key
        pull = self.pulls.pop(key)
        num_tokens = pull.reservation.num_external_tokens
        self._prefixes.publish_intact(pull.seq.request, num_tokens, event.failed)
        self._inbound.finish(key)
        self._requests.finished(key)
        self._kv.free(key)
        pull.seq.hit_before_pull = pull.own_tokens
        self._requeue(pull, "read_failed", event.message)

    def failed(self, now_ms: int, event: InboundFailed) -> None:
        """The pull failed: compute the prefix."""
        self._give_up(event.key, event.reason, event.message)

    def drained(self, event: InboundDrained) -> None:
        """Count a transfer whose destinations are free again."""
        self._counters.add("transfers_drained")

    # -- ending -------------------------------------------------------------------------------

    def end(self, key: RequestKey, reason: str) -> None:
        """The generation ends here; nothing if its prefix is not being pulled."""
        if self.pulls.pop(key, None) is not None:
            self._drop(key, reason)

    # -- inside -------------------------------------------------------------------------------

    def _give_up(self, key: RequestKey, cause: str, message: str) -> None:
        """Give a pull up; destinations of READs in progress stay held by the transfer."""
        pull = self.pulls.pop(key)
        self._drop(key, cause)
        self._requeue(pull, cause, message)

    def _requeue(self, pull: PrefixPull, cause: str, message: str) -> None:
        """Put a sequence that holds nothing back to its place in the queue; report why."""
        self._counters.add("prefix_pulls_failed_" + cause)
        self._batcher.requeue(pull.seq)
        owner = pull.plan.owner.incarnation
        self._out.add(ToRouter(failed_report(pull.seq.key, owner, f"{cause}: {message}")))

    def _drop(self, key: RequestKey, reason: str) -> None:
        """Withdraw the request, abort what is being read, free the sequence's blocks."""
        self._requests.give_up(key, reason)
        self._inbound.abort(key)
        self._kv.free(key)
