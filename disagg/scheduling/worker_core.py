"""Everything a worker decides, without a clock, a socket or a tensor.

The shell feeds events in, one at a time and in order, and carries out the returned actions in
order:

- `on_router_message` for what the router's stream brings, `on_router_lost` when it ends;
- `on_peer_message` for other workers' messages, `on_peer_lost` when a stream to or from an
  incarnation ends or its epoch changed;
- `next_step` when the engine is idle, `on_step_done` when it finished;
- `on_read_done` exactly once for every `PostRead`;
- `tick` every few milliseconds.

Only one thread may call it.
"""

from collections.abc import Callable

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.layout import KVCacheLayout
from disagg.kv.request import KVRequest
from disagg.scheduling.actions import ConnectPeer, Exit, ToRouter, WorkerAction
from disagg.scheduling.admission import complaint_about, num_blocks_for
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.incoming import Incoming
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.messages import (
    Cancel,
    EndReason,
    FinishReason,
    PartEnded,
    Role,
    RouterMessage,
    SequenceOutput,
    StepOutputs,
    Submit,
)
from disagg.scheduling.outgoing import Outgoing, owner_of
from disagg.scheduling.sampling import SampledToken, TokenLogprobs
from disagg.scheduling.sequence import Phase, Sequence
from disagg.scheduling.share import HandoverShare
from disagg.scheduling.step import Step, StepResult
from disagg.transfer.actions import (
    InboundAction,
    InboundCommitted,
    InboundDrained,
    InboundFailed,
    PostRead,
    Send,
)
from disagg.transfer.identity import Incarnation, RequestKey
from disagg.transfer.inbound import InboundTable
from disagg.transfer.leases import LeaseTable
from disagg.transfer.messages import (
    AskOffers,
    Commit,
    CommitAnswer,
    CommitSeen,
    Ended,
    Offers,
    PeerMessage,
    Release,
    Reserve,
    Reserved,
    WrongEpoch,
)


class WorkerCore:
    """One worker's control: queue, batches, reservations, leases, pulls."""

    def __init__(
        self,
        me: Incarnation,
        layout: KVCacheLayout,
        coordinator: KVCacheCoordinator,
        hasher: BlockHasher,
        limits: WorkerLimits,
        random_delay_ms: Callable[[int], int],
    ) -> None:
        self.me = me
        self.limits = limits
        self.kv = coordinator
        self._hasher = hasher
        self.sequences: dict[RequestKey, Sequence] = {}
        self._arrivals = 0
        self.share = HandoverShare(int(limits.handover_share_max * coordinator.num_usable_blocks))
        self.batcher = Batcher(coordinator, limits)
        self.leases = LeaseTable(
            me,
            coordinator.pool,
            ttl_ms=limits.lease_ttl_ms,
            committed_max=limits.committed_max,
        )
        self.inbound = InboundTable(
            me,
            coordinator.pool,
            commit_repeat_ms=limits.commit_repeat_ms,
            ask_repeat_ms=limits.commit_repeat_ms,
            read_stuck_ms=limits.read_stuck_ms,
            blocks_per_read_max=limits.blocks_per_read_max,
        )
        self.outgoing = Outgoing(coordinator, self.leases, self.share, limits, random_delay_ms)
        self.incoming = Incoming(layout, coordinator, self.inbound, self.share, limits)
        self.counters: dict[str, int] = {}

    # --- router

    def on_router_message(self, now_ms: int, message: RouterMessage) -> list[WorkerAction]:
        """Start or end a generation."""
        if isinstance(message, Cancel):
            return self._cancel(now_ms, message.key, message.reason)
        return self._submit(now_ms, message)

    def on_router_lost(self, now_ms: int) -> list[WorkerAction]:
        """Nobody reads the answers any more: end everything."""
        actions: list[WorkerAction] = []
        for key in list(self.sequences):
            actions += self._cancel(now_ms, key, "router lost")
        return actions

    # --- peers

    def on_peer_message(
        self, now_ms: int, sender: Incarnation, message: PeerMessage
    ) -> list[WorkerAction]:
        """Handle another worker's message; unknown or ended generations change nothing."""
        match message:
            case Reserve():
                refusal = self._refuses_reservations(sender)
                return self._transfer(
                    now_ms, self.incoming.on_reserve(now_ms, sender, message, refusal)
                )
            case Reserved() if message.key not in self.sequences:
                return list(self.outgoing.on_late_answer(sender, message))
            case Reserved():
                actions, seq = self.outgoing.on_reserved(now_ms, sender, message)
                if seq is not None:
                    self.batcher.run(seq)
                return list(actions)
            case Release():
                return self._transfer(now_ms, self.incoming.on_release(now_ms, sender, message))
            case Offers():
                return self._transfer(now_ms, self.inbound.on_offers(now_ms, sender, message))
            case CommitAnswer():
                return self._transfer(
                    now_ms, self.inbound.on_commit_answer(now_ms, sender, message)
                )
            case AskOffers() | Commit() | CommitSeen():
                return list(self.outgoing.on_lease_message(sender, message))
            case Ended():
                return self._peer_ended(now_ms, sender, message)
            case WrongEpoch():
                # The addressee is another life of that worker: ours is gone.
                return []

    def on_peer_lost(self, now_ms: int, peer: Incarnation) -> list[WorkerAction]:
        """A stream's end or a new epoch counts as the peer's abort of everything with it."""
        actions: list[WorkerAction] = list(self.outgoing.on_peer_lost(peer))
        actions += self._transfer(now_ms, self.inbound.on_peer_lost(now_ms, peer))
        for seq in self.incoming.owned_by(peer):
            actions += self._end(now_ms, seq, EndReason.PEER_LOST, f"{peer} was lost")
        for seq in list(self.sequences.values()):
            if seq.role is Role.PREFILL and owner_of(seq).incarnation == peer:
                actions += self._end(now_ms, seq, EndReason.PEER_LOST, f"{peer} was lost")
        return actions

    # --- engine

    def next_step(self, now_ms: int) -> tuple[Step | None, list[WorkerAction]]:
        """The next batch, or None when there is nothing to compute or one is in flight."""
        actions: list[WorkerAction] = []
        if self.batcher.step_in_flight:
            return None, actions
        num_elsewhere = len(self.outgoing.reserving) + len(self.incoming.pulls)
        for seq in self.batcher.take_startable(num_elsewhere):
            if seq.role is Role.PREFILL:
                actions += self.outgoing.reserve(now_ms, seq)
            else:
                self.batcher.run(seq)
        step, preempted = self.batcher.build_step()
        for seq in preempted:
            if seq.role is Role.PREFILL:
                actions += self.outgoing.give_back(seq, "preempted")
            else:
                seq.preempted = True
            actions += self._queue(now_ms, seq)
        return step, actions

    def on_step_done(self, now_ms: int, result: StepResult) -> list[WorkerAction]:
        """Account for a finished step: publish, sample, finish, hand over."""
        step, sequences = self.batcher.complete(result.step_id)
        actions: list[WorkerAction] = []
        outputs: list[SequenceOutput] = []
        alive = [  # others were cancelled in between; the step's hold kept their blocks until now
            (i, seq, part.start + len(part.token_ids))
            for i, (seq, part) in enumerate(zip(sequences, step.slices, strict=True))
            if self.sequences.get(seq.key) is seq and seq.phase is Phase.RUNNING
        ]
        if not result.error:
            self.kv.publish_step([(seq.key, num_computed) for _, seq, num_computed in alive])
        for i, seq, num_computed in alive:
            if result.error:
                actions += self._end(now_ms, seq, EndReason.STEP_FAILED, result.error)
                continue
            seq.num_computed = num_computed
            sample = result.samples[i]
            if sample is not None:
                actions += self._sampled(now_ms, seq, sample, outputs)
            elif seq.role is Role.PREFILL:
                actions += self.outgoing.offer(now_ms, seq)
        if outputs:  # after the prefill reports, which belong to the first token's usage
            actions.append(ToRouter(StepOutputs(tuple(outputs))))
        return actions

    # --- transfer shell

    def on_read_done(self, now_ms: int, read_id: int, error: str) -> list[WorkerAction]:
        """Every handle of a READ is terminal."""
        return self._transfer(now_ms, self.inbound.on_read_done(now_ms, read_id, error))

    # --- time

    def tick(self, now_ms: int) -> list[WorkerAction]:
        """Time-outs, repeats and retries that are due."""
        out, ready = self.outgoing.tick(now_ms)
        actions: list[WorkerAction] = list(out)
        for key in self.outgoing.take_ended_leases():
            actions += self._lease_ended(now_ms, key)
        for seq in ready:
            if seq.passes > self.limits.reserve_passes_max:
                actions += self._end(
                    now_ms, seq, EndReason.RESERVE_REFUSED, f"refused {seq.passes} times"
                )
            else:
                self.batcher.enqueue(seq)
        actions += self._transfer(now_ms, self.inbound.tick(now_ms))
        for seq in self.incoming.expired(now_ms):
            actions += self._end(now_ms, seq, EndReason.EXPIRED, "no hand-over in time")
        if not self.ready:
            actions.append(Exit("READs that may still land hold too much of the pool"))
        return actions

    @property
    def ready(self) -> bool:
        """READs that may still land hold no more of the pool than they may."""
        quarantine_max = self.limits.quarantine_share_max * self.kv.num_usable_blocks
        return self.inbound.num_blocks_quarantined <= quarantine_max

    # --- inside

    def _submit(self, now_ms: int, submit: Submit) -> list[WorkerAction]:
        if submit.key in self.sequences:
            return []  # idempotent
        if complaint := complaint_about(submit, self.limits, self.kv):
            return [ToRouter(PartEnded(submit.key, EndReason.REJECTED, complaint))]
        request = KVRequest(submit.key, list(submit.token_ids), list(submit.hashes))
        self._hasher.extend(request.hashes, request.token_ids, submit.cache_salt)
        seq = Sequence(submit, request, self._arrivals)
        self._arrivals += 1
        self.sequences[seq.key] = seq
        actions: list[WorkerAction] = []
        if submit.peer is not None:
            actions.append(ConnectPeer(submit.peer))
        if submit.role is Role.DECODE:
            if len(self.incoming.awaiting) >= self.limits.max_waiting:
                return self._end(now_ms, seq, EndReason.CAPACITY, "too many awaited hand-overs")
            self.incoming.submitted(now_ms, seq)
            return actions
        return actions + self._queue(now_ms, seq)

    def _queue(self, now_ms: int, seq: Sequence) -> list[WorkerAction]:
        if len(self.batcher.waiting) >= self.limits.max_waiting and not seq.preempted:
            return self._end(now_ms, seq, EndReason.CAPACITY, "the queue is full")
        if num_blocks_for(self.kv, seq.num_tokens) > self.kv.num_usable_blocks:
            return self._end(now_ms, seq, EndReason.REJECTED, "it has outgrown the pool")
        self.batcher.enqueue(seq)
        return []

    def _sampled(
        self, now_ms: int, seq: Sequence, sample: SampledToken, outputs: list[SequenceOutput]
    ) -> list[WorkerAction]:
        output = seq.emit(sample, self._hasher, self.limits.max_model_tokens)
        outputs.append(output)
        self.kv.unpromise(seq.key)  # the prompt is complete; from here on memory is asked for
        actions: list[WorkerAction] = []
        if not seq.prefill_reported:
            seq.prefill_reported = True
            actions.append(ToRouter(seq.prefill_report()))
        if output.finish_reason is not FinishReason.NONE:
            if seq.role is Role.PREFILL:
                actions += self.outgoing.give_back(seq, "token 0 ended the request")
            self._forget(seq)
        elif seq.role is Role.PREFILL:
            actions += self.outgoing.seal(now_ms, seq, sample)
            self._forget(seq)
        return actions

    def _transfer(self, now_ms: int, events: list[InboundAction]) -> list[WorkerAction]:
        """Act on what the inbound table reports; pass on what is for the shell."""
        actions: list[WorkerAction] = []
        for event in events:
            match event:
                case InboundCommitted():
                    actions += self._committed(event)
                case InboundFailed():
                    self._count("transfers_failed_" + event.reason)
                    seq = self.incoming.find(event.key)
                    if seq is not None:
                        reason = EndReason(event.reason)
                        actions += self._end(now_ms, seq, reason, event.message)
                case InboundDrained():
                    self._count("transfers_drained")
                case Send() | PostRead():
                    actions.append(event)
        return actions

    def _committed(self, event: InboundCommitted) -> list[WorkerAction]:
        seq, report = self.incoming.committed(event)
        self._count("transfers_committed")
        self._count("pulled_bytes", sum(group.pulled_bytes for group in report.groups))
        seal = event.seal
        logprobs = None
        if seq.submit.sampling.num_logprobs >= 0:
            logprobs = TokenLogprobs(seal.first_logprob, seal.first_top_logprobs)
        first = SampledToken(seal.first_token_id, logprobs)
        seq.prefill_reported = True
        # Said again by this worker, so that a prefill worker that dies now takes nothing along.
        output = seq.emit(first, self._hasher, self.limits.max_model_tokens)
        if output.finish_reason is FinishReason.NONE:
            self.batcher.run(seq)
        else:
            self._forget(seq)
        return [ToRouter(report), ToRouter(StepOutputs((output,)))]

    def _peer_ended(self, now_ms: int, sender: Incarnation, message: Ended) -> list[WorkerAction]:
        seq = self.sequences.get(message.key)
        if seq is None:
            return list(self.outgoing.on_ended(sender, message))
        if seq.submit.peer is None or seq.submit.peer.incarnation != sender:
            return []
        if seq.role is Role.DECODE and self.incoming.find(seq.key) is None:
            return []  # committed long ago; the prefill worker's part is over
        return self._end(now_ms, seq, EndReason.PEER_ENDED, message.reason, tell_peer=False)

    def _cancel(self, now_ms: int, key: RequestKey, reason: str) -> list[WorkerAction]:
        seq = self.sequences.get(key)
        if seq is None:
            # The prefill part may be over and only its lease be left.
            return list(self.outgoing.end_lease(key, reason))
        actions = self._end(now_ms, seq, EndReason.CANCELLED, reason)
        return [action for action in actions if not isinstance(action, ToRouter)]

    def _end(
        self,
        now_ms: int,
        seq: Sequence,
        reason: EndReason,
        message: str,
        *,
        tell_peer: bool = True,
    ) -> list[WorkerAction]:
        """End this worker's part: give everything back, tell the peer and the router."""
        actions: list[WorkerAction] = []
        pulling = self.incoming.find(seq.key) is not None
        if seq.role is Role.PREFILL:
            actions += self.outgoing.give_back(seq, reason)
        elif pulling:
            actions += self._transfer(now_ms, self.incoming.end(now_ms, seq, reason))
        if tell_peer and (pulling or seq.role is Role.PREFILL):
            actions.append(Send(owner_of(seq).incarnation, Ended(seq.key, reason)))
        self._forget(seq)
        self._count("parts_ended_" + reason)
        actions.append(ToRouter(PartEnded(seq.key, reason, message)))
        return actions

    def _lease_ended(self, now_ms: int, key: RequestKey) -> list[WorkerAction]:
        """A lease that dies before its seal takes the prefill along; the router plans anew."""
        seq = self.sequences.get(key)
        if seq is None or seq.lease_id is None:
            return []
        return self._end(now_ms, seq, EndReason.LEASE_DEAD, "the lease ended before its seal")

    def _forget(self, seq: Sequence) -> None:
        self.batcher.remove(seq)
        self.kv.free(seq.key)
        self.sequences.pop(seq.key, None)

    def _refuses_reservations(self, sender: Incarnation) -> str:
        if self.batcher.preempted_waiting:
            return "an older request waits for memory"
        if sender in self.inbound.peers_paused:
            return "a READ from there is stuck"
        num_holding = len(self.batcher.running) + len(self.incoming.pulls)
        if num_holding >= self.limits.max_sequences:
            return "too many sequences"
        return ""

    def _count(self, name: str, by: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by
