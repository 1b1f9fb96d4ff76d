"""This worker's parts in generations: how they begin, pull, sample and end."""

from collections.abc import Iterable

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.sequence import KVSequence
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import FinishReason, SequenceOutput, StepOutputs
from disagg.messages.peer import Ended, Offers
from disagg.messages.sampling import SampledToken, TokenLogprobs
from disagg.messages.session import EndReason, PartEnded, Role, Submit
from disagg.scheduling.actions import ConnectPeer, ToRouter, WorkerAction
from disagg.scheduling.admission import complaint_about, num_blocks_for
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.counters import Counters
from disagg.scheduling.incoming import Incoming
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.outgoing import Outgoing, peer_of
from disagg.scheduling.prefix_reader import PrefixReader
from disagg.scheduling.sequence import Sequence
from disagg.scheduling.transfer_report import pulled_bytes
from disagg.transfer.actions import (
    InboundAction,
    InboundCommitted,
    InboundDrained,
    InboundFailed,
    InboundPartial,
    PostRead,
    Send,
)
from disagg.transfer.inbound import InboundTable
from disagg.transfer.lease_asker import Answer, LeaseAsker, TimedOut


class Parts:
    """Every generation this worker has a part in.

    Attributes:
        sequences: by key; each is in exactly one place: the queue, the batch, or one of the sides
            of a transfer.
        counters: what happened, by name.
    """

    def __init__(
        self,
        kv: KVCacheCoordinator,
        hasher: BlockHasher,
        limits: WorkerLimits,
        batcher: Batcher,
        outgoing: Outgoing,
        incoming: Incoming,
        prefixes: PrefixReader,
        inbound: InboundTable,
        asker: LeaseAsker,
        counters: Counters,
    ) -> None:
        self._kv = kv
        self._hasher = hasher
        self._limits = limits
        self._batcher = batcher
        self._outgoing = outgoing
        self._incoming = incoming
        self._prefixes = prefixes
        self._inbound = inbound
        self._asker = asker
        self.counters = counters
        self.sequences: dict[RequestKey, Sequence] = {}
        self._arrivals = 0

    # -- beginning ----------------------------------------------------------------------------

    def submit(self, now_ms: int, submit: Submit) -> list[WorkerAction]:
        """The router starts a generation here; a repeated one changes nothing."""
        if submit.key in self.sequences:
            return []  # idempotent
        if complaint := complaint_about(submit, self._limits, self._kv):
            return [ToRouter(PartEnded(submit.key, EndReason.REJECTED, complaint))]
        request = KVSequence(submit.key, list(submit.token_ids), list(submit.hashes))
        self._hasher.extend(request.hashes, request.token_ids, submit.cache_salt)
        seq = Sequence(submit, request, self._arrivals)
        self._arrivals += 1
        self.sequences[seq.key] = seq
        actions: list[WorkerAction] = []
        if submit.peer is not None:
            actions.append(ConnectPeer(submit.peer))
        if submit.pull is not None:
            actions.append(ConnectPeer(submit.pull.owner))
        if submit.take_over is not None:
            asked, refusal = self._incoming.take_over(now_ms, seq)
            if refusal:
                return self.end(now_ms, seq, EndReason.TAKE_OVER_REFUSED, refusal)
            return [*actions, *asked]
        if submit.role is Role.DECODE:
            if len(self._incoming.awaiting) >= self._limits.max_waiting:
                return self.end(now_ms, seq, EndReason.CAPACITY, "too many awaited hand-overs")
            self._incoming.submitted(now_ms, seq)
            return actions
        return actions + self.queue(now_ms, seq)

    def queue(self, now_ms: int, seq: Sequence) -> list[WorkerAction]:
        """Let a sequence that holds nothing wait for its turn."""
        if len(self._batcher.waiting) >= self._limits.max_waiting and not seq.preempted:
            return self.end(now_ms, seq, EndReason.CAPACITY, "the queue is full")
        if num_blocks_for(self._kv, seq.num_tokens) > self._kv.num_usable_blocks:
            return self.end(now_ms, seq, EndReason.REJECTED, "it has outgrown the pool")
        self._batcher.enqueue(seq)
        return []

    def start(self, now_ms: int, seq: Sequence) -> list[WorkerAction]:
        """A sequence that holds what it needs here: compute, or reserve at the decode worker."""
        if seq.role is Role.PREFILL:
            return list(self._outgoing.reserve(now_ms, seq))
        self._batcher.run(seq)
        return []

    # -- leases asked for ---------------------------------------------------------------------

    def on_answer(self, now_ms: int, sender: Incarnation, offers: Offers) -> list[WorkerAction]:
        """An owner answers a question, again perhaps, or ends its lease."""
        match self._asker.on_offers(now_ms, sender, offers):
            case Answer.LEASE if offers.key in self._prefixes.pulls:
                return self.act_on(now_ms, self._prefixes.answered(now_ms, sender, offers))
            case Answer.LEASE if self._incoming.covers(offers):
                return self.act_on(now_ms, self._incoming.answered(now_ms, sender, offers))
            case Answer.LEASE:
                return self._no_lease(now_ms, offers.key, "answer", "not what was asked for")
            case Answer.NONE:
                return self._no_lease(now_ms, offers.key, "none", "the owner has none for us")
            case Answer.KNOWN:
                return self.act_on(now_ms, self._inbound.on_offers(now_ms, sender, offers))
            case Answer.STALE:
                return list(self._asker.withdrawal(sender, offers))

    def on_owner_lost(self, now_ms: int, owner: Incarnation) -> list[WorkerAction]:
        """Questions that an owner will not answer; what is being read fails by itself."""
        actions: list[WorkerAction] = []
        for key in self._asker.on_peer_lost(owner):
            actions += self._no_lease(now_ms, key, "peer_lost", f"{owner} is gone")
        return actions

    def tick(self, now_ms: int) -> list[WorkerAction]:
        """Repeat questions, give up what took too long."""
        actions: list[WorkerAction] = []
        for action in self._asker.tick(now_ms):
            if isinstance(action, TimedOut):
                actions += self._no_lease(now_ms, action.key, "timeout", "not committed in time")
            else:
                actions.append(action)
        return actions

    def _no_lease(
        self, now_ms: int, key: RequestKey, cause: str, message: str
    ) -> list[WorkerAction]:
        """A prefix is computed instead; a take-over ends its part, the router plans anew."""
        if key in self._prefixes.pulls:
            return self.act_on(now_ms, self._prefixes.failed(now_ms, key, cause, message))
        seq = self._incoming.find(key)
        if seq is None:
            return []
        return self.end(now_ms, seq, EndReason.TAKE_OVER_REFUSED, f"{cause}: {message}")

    # -- going on -----------------------------------------------------------------------------

    def sampled(
        self, now_ms: int, seq: Sequence, sample: SampledToken, outputs: list[SequenceOutput]
    ) -> list[WorkerAction]:
        """A step sampled a token; appends what the router is told to ``outputs``."""
        output = seq.emit(sample, self._hasher, self._limits.max_model_tokens)
        outputs.append(output)
        self._kv.unpromise(seq.key)  # the prompt is complete; from here on memory is asked for
        actions: list[WorkerAction] = []
        if not seq.prefill_reported:
            seq.prefill_reported = True
            actions.append(ToRouter(seq.prefill_report()))
        if output.finish_reason is not FinishReason.NONE:
            if seq.role is Role.PREFILL:
                actions += self._outgoing.give_back(seq, "token 0 ended the request")
            self._forget(seq)
        elif seq.role is Role.PREFILL:
            actions += self._outgoing.seal(now_ms, seq, sample)
            self._forget(seq)
        return actions

    def act_on(self, now_ms: int, events: Iterable[InboundAction | ToRouter]) -> list[WorkerAction]:
        """Act on what the inbound table reports; pass on what is for the shell."""
        actions: list[WorkerAction] = []
        for event in events:
            match event:
                case InboundCommitted(key) if key in self._prefixes.pulls:
                    actions += self._prefix_committed(now_ms, event)
                case InboundCommitted():
                    actions += self._committed(event)
                case InboundPartial(key) if key in self._prefixes.pulls:
                    self.counters.add("transfers_recovered")
                    actions += self.act_on(now_ms, self._prefixes.partly_committed(event))
                case InboundPartial():
                    self.counters.add("transfers_recovered")
                    self.counters.add("transfers_failed_read_failed")
                    pulled = self._incoming.partly_committed(event)
                    actions += self.end(now_ms, pulled, EndReason.READ_FAILED, event.message)
                case InboundFailed(key, cause, text) if key in self._prefixes.pulls:
                    more = self._prefixes.failed(now_ms, key, cause, text)
                    actions += self.act_on(now_ms, more)
                case InboundFailed():
                    self.counters.add("transfers_failed_" + event.reason)
                    seq = self._incoming.find(event.key)
                    if seq is not None:
                        reason = EndReason(event.reason)
                        actions += self.end(now_ms, seq, reason, event.message)
                case InboundDrained():
                    self.counters.add("transfers_drained")
                case Send() | PostRead() | ToRouter():
                    actions.append(event)
        return actions

    def _prefix_committed(self, now_ms: int, event: InboundCommitted) -> list[WorkerAction]:
        seq, report = self._prefixes.committed(event)
        self.counters.add("prefix_pulled_bytes", pulled_bytes(report))
        return [ToRouter(report), *self.start(now_ms, seq)]

    def _committed(self, event: InboundCommitted) -> list[WorkerAction]:
        seq, report = self._incoming.committed(event)
        self.counters.add("transfers_committed")
        self.counters.add("pulled_bytes", pulled_bytes(report))
        if seq.submit.take_over is not None:
            self.counters.add("take_overs")
            seq.prefill_reported = True
            self._batcher.run(seq)
            return [ToRouter(report)]
        seal = event.seal
        logprobs = None
        if seq.submit.sampling.num_logprobs is not None:
            logprobs = TokenLogprobs(seal.first_logprob, seal.first_top_logprobs)
        first = SampledToken(seal.first_token_id, logprobs)
        seq.prefill_reported = True
        # Said again by this worker, so that a prefill worker that dies now takes nothing along.
        output = seq.emit(first, self._hasher, self._limits.max_model_tokens)
        if output.finish_reason is FinishReason.NONE:
            self._batcher.run(seq)
        else:
            self._forget(seq)
        return [ToRouter(report), ToRouter(StepOutputs((output,)))]

    # -- ending -------------------------------------------------------------------------------

    def peer_ended(self, now_ms: int, sender: Incarnation, message: Ended) -> list[WorkerAction]:
        """The peer of a hand-over ended its part; anybody else changes nothing."""
        seq = self.sequences.get(message.key)
        if seq is None:
            return list(self._outgoing.on_ended(sender, message))
        if seq.submit.peer is None or seq.submit.peer.incarnation != sender:
            return []
        if seq.role is Role.DECODE and self._incoming.find(seq.key) is None:
            return []  # committed long ago; the prefill worker's part is over
        return self.end(now_ms, seq, EndReason.PEER_ENDED, message.reason, tell_peer=False)

    def cancel(self, now_ms: int, key: RequestKey, reason: str) -> list[WorkerAction]:
        """The router ends a generation; unknown ones are ignored."""
        seq = self.sequences.get(key)
        if seq is None:
            # The prefill part may be over and only its lease be left.
            return list(self._outgoing.end_lease(key, reason))
        actions = self.end(now_ms, seq, EndReason.CANCELLED, reason)
        return [action for action in actions if not isinstance(action, ToRouter)]

    def end(
        self,
        now_ms: int,
        seq: Sequence,
        reason: EndReason,
        message: str,
        *,
        tell_peer: bool = True,
    ) -> list[WorkerAction]:
        """End this worker's part: give everything back, tell the peer and the router."""
        actions = self.act_on(now_ms, self._prefixes.end(now_ms, seq.key, reason))
        pulling = self._incoming.find(seq.key) is not None
        if seq.role is Role.PREFILL:
            actions += self._outgoing.give_back(seq, reason)
        elif pulling:
            actions += self.act_on(now_ms, self._incoming.end(now_ms, seq, reason))
        if tell_peer and (pulling or seq.role is Role.PREFILL):
            actions.append(Send(peer_of(seq).incarnation, Ended(seq.key, reason)))
        self._forget(seq)
        self.counters.add("parts_ended_" + reason)
        actions.append(ToRouter(PartEnded(seq.key, reason, message)))
        return actions

    def lease_ended(self, now_ms: int, key: RequestKey, lease_id: int) -> list[WorkerAction]:
        """A lease that dies before its seal takes the prefill along; the router plans anew."""
        seq = self.sequences.get(key)
        if seq is None or seq.lease_id != lease_id:
            return []
        return self.end(now_ms, seq, EndReason.LEASE_DEAD, "the lease ended before its seal")

    def _forget(self, seq: Sequence) -> None:
        self._batcher.remove(seq)
        self._kv.free(seq.key)
        self.sequences.pop(seq.key, None)
