"""Prefix pulls into this worker: reserve, ask, read, commit; whatever fails, compute instead.

A pull never fails its generation. While it goes on the sequence holds its blocks for a bounded
time only; when it ends without a commit the sequence gives them back and takes its place in the
queue again, without a pull.
"""

from dataclasses import dataclass

from disagg.kv.blocks.hits import CacheHit, ExternalReservation
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.prefix_sharing import PrefixSharing
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import AskLease, Offers
from disagg.messages.session import PullPlan, TransferKind, TransferReport
from disagg.scheduling.actions import ToRouter
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.counters import Counters
from disagg.scheduling.sequence import Phase, Sequence
from disagg.scheduling.transfer_report import committed_report, failed_report
from disagg.transfer.actions import InboundAction, InboundCommitted, InboundPartial, Send
from disagg.transfer.inbound import InboundTable
from disagg.transfer.lease_asker import LeaseAsker

HASHES_MAX = 1 << 20
"""In one question; 32 MiB of them, half of what a gRPC message may have."""


@dataclass(slots=True)
class PrefixPull:
    """A sequence that waits for its prefix, and what is reserved for it."""

    seq: Sequence
    plan: PullPlan
    reservation: ExternalReservation
    own_tokens: int
    """What this worker's cache has by itself."""


class PrefixReader:
    """Sequences whose prefix is being pulled.

    Args:
        kv: this worker's coordinator.
        prefixes: what can be pulled, over it.
        inbound: this worker's inbound transfers.
        asker: this worker's questions for leases.
        batcher: where sequences go when their pull is given up.
        counters: what happened to pulls is counted there.
    """

    def __init__(
        self,
        kv: KVCacheCoordinator,
        prefixes: PrefixSharing,
        inbound: InboundTable,
        asker: LeaseAsker,
        batcher: Batcher,
        counters: Counters,
    ) -> None:
        self._kv = kv
        self._prefixes = prefixes
        self._inbound = inbound
        self._batcher = batcher
        self._counters = counters
        self._asker = asker
        self.pulls: dict[RequestKey, PrefixPull] = {}

    # -- beginning ----------------------------------------------------------------------------

    def reserve(self, seq: Sequence, hit: CacheHit) -> bool:
        """Take the blocks for a sequence whose prefix another worker has more of.

        False, and nothing has changed, where no pull is planned, the own hit is as long, reads
        from that worker are paused, or memory for it is lacking: a pull is never waited for.
        """
        plan = seq.pull
        if plan is None:
            return False
        num_tokens = self._prefixes.boundary(min(plan.num_tokens, seq.num_tokens - 1))
        paused = plan.owner.incarnation in self._inbound.peers_paused
        if num_tokens <= hit.num_tokens or paused:
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

    def ask(self, now_ms: int, seq: Sequence) -> list[InboundAction | ToRouter]:
        """Send the question of a sequence whose blocks were just reserved."""
        pull = self.pulls[seq.key]
        wanted = self._prefixes.wanted(seq.request, pull.reservation, pull.own_tokens)
        if len(wanted.hashes) > HASHES_MAX:
            return self.failed(now_ms, seq.key, "too_long", "more hashes than a message takes")
        self._counters.add("prefix_pulls")
        question = AskLease(
            seq.key, 0, wanted.num_tokens, wanted.first_hash, wanted.hashes, wanted.first_lacked
        )
        return [self._asker.ask(now_ms, pull.plan.owner.incarnation, question)]

    # -- what happens -------------------------------------------------------------------------

    def answered(
        self, now_ms: int, owner: Incarnation, offers: Offers
    ) -> list[InboundAction | ToRouter]:
        """Begin the transfer, up to the boundary of the answer; the surplus goes back first."""
        key = offers.key
        pull = self.pulls[key]
        asked = pull.reservation.num_external_tokens
        num_tokens = offers.seal.num_tokens if offers.seal else 0
        if num_tokens > asked or self._prefixes.boundary(num_tokens) < num_tokens:
            return self.failed(now_ms, key, "answer", f"no boundary: {num_tokens} tokens")
        if num_tokens <= pull.own_tokens:
            return self.failed(now_ms, key, "none", "the owner has no more of it")
        if num_tokens < asked:
            self._kv.free(key)
            shorter = self._prefixes.reserve(pull.seq.request, num_tokens, pull.seq.num_tokens)
            if shorter is None:
                return self.failed(now_ms, key, "memory", "no room for a shorter prefix")
            pull.reservation = shorter
        self._inbound.begin(now_ms, key, owner, pull.reservation.lacks, offers.lease_id)
        return [*self._inbound.on_offers(now_ms, owner, offers)]

    def committed(self, event: InboundCommitted) -> tuple[Sequence, TransferReport]:
        """The owner confirmed: publish; the sequence may go on after the boundary."""
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
        self._asker.finished(key)
        pull.seq.hit_before_pull = pull.own_tokens
        pull.seq.starts_from(report.num_tokens)
        self._counters.add("prefix_pulls_committed")
        return pull.seq, report

    def partly_committed(self, event: InboundPartial) -> list[InboundAction | ToRouter]:
        """Some blocks did not arrive: keep the others, compute what is lacking."""
        key = event.key
        pull = self.pulls.pop(key)
        num_tokens = pull.reservation.num_external_tokens
        self._prefixes.publish_intact(pull.seq.request, num_tokens, event.failed)
        self._inbound.finish(key)
        self._asker.finished(key)
        self._kv.free(key)
        pull.seq.hit_before_pull = pull.own_tokens
        self._counters.add("prefix_pulls_failed_read_failed")
        self._batcher.requeue(pull.seq)
        owner = pull.plan.owner.incarnation
        return [ToRouter(failed_report(key, owner, f"read_failed: {event.message}"))]

    def failed(
        self, now_ms: int, key: RequestKey, cause: str, message: str
    ) -> list[InboundAction | ToRouter]:
        """Give a pull up: the sequence drops its blocks and goes back to its place in the queue.

        Destinations of READs in progress stay held by the inbound transfer.
        """
        pull = self.pulls.pop(key)
        actions = self._drop(now_ms, key, cause)
        self._counters.add("prefix_pulls_failed_" + cause)
        self._batcher.requeue(pull.seq)
        owner = pull.plan.owner.incarnation
        return [*actions, ToRouter(failed_report(key, owner, f"{cause}: {message}"))]

    def end(self, now_ms: int, key: RequestKey, reason: str) -> list[InboundAction]:
        """The generation ends here; nothing if its prefix is not being pulled."""
        if self.pulls.pop(key, None) is None:
            return []
        return self._drop(now_ms, key, reason)

    # -- inside -------------------------------------------------------------------------------

    def _drop(self, now_ms: int, key: RequestKey, reason: str) -> list[InboundAction]:
        """Withdraw the question, abort what is being read, free the sequence's blocks."""
        withdrawn: list[Send] = self._asker.give_up(key, reason)
        aborted = self._inbound.abort(now_ms, key, reason)
        self._kv.free(key)
        return [*withdrawn, *aborted]
