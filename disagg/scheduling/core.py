"""Everything a worker decides, without a clock, a socket or a tensor.

The shell feeds events in, one at a time and in order, and carries out the returned actions in
order:

- `on_router_message` for what the router's stream brings, `on_router_lost` when it ends;
- `on_peer_message` for other workers' messages, `on_peer_lost` when a stream to or from an
  incarnation ends or its epoch changed;
- `next_step` after every event until there is none, or later (`StepPace`), `on_step_done` when a
  step has ended, in the order of their launch;
- `on_read_done` exactly once for every `PostRead`;
- `tick` every few milliseconds.

Only one thread may call it.
"""

from collections.abc import Callable

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import FinishReason, SequenceOutput, StepOutputs
from disagg.messages.peer import (
    AskLease,
    AskOffers,
    Commit,
    CommitAnswer,
    CommitSeen,
    Ended,
    LeaseRefused,
    Offers,
    PeerMessage,
    ReadProgress,
    Release,
    Reserve,
    Reserved,
    TakeOver,
    WithdrawLease,
    WrongEpoch,
)
from disagg.messages.sampling import SampledToken
from disagg.messages.session import (
    Cancel,
    EndReason,
    PartEnded,
    PrefillProgress,
    Role,
    Submit,
    ToWorkerMessage,
)
from disagg.scheduling.actions import (
    CheckTransport,
    ConnectPeer,
    Exit,
    ToRouter,
    WorkerAction,
)
from disagg.scheduling.admission import num_blocks_for, rejection_of
from disagg.scheduling.handover.decode_side import DecodeSide
from disagg.scheduling.handover.prefill_side import PrefillSide
from disagg.scheduling.handover.prefix_lending import PrefixLender
from disagg.scheduling.handover.prefix_pull import PrefixPullSide
from disagg.scheduling.handover.worker_state import create_state
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.sequence import Phase, Sequence
from disagg.scheduling.step import Step, StepResult
from disagg.transfer.actions import READ_FAULTS


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
        worker = create_state(me, coordinator, hasher, limits)
        self.counters, self.budget, self._out = worker.counters, worker.budget, worker.out
        self.batcher, self.generations = worker.batcher, worker.generations
        self.admission = worker.admission
        self.leases, self.lease_answers = worker.leases, worker.lease_answers
        self.inbound, self.lease_requests = worker.inbound, worker.lease_requests
        self.prefill_side = PrefillSide(worker, random_delay_ms)
        self.decode_side = DecodeSide(worker)
        self.prefix_pull = PrefixPullSide(worker, self.prefill_side)
        self.prefix_lender = PrefixLender(worker)
        self._drain_until_ms: int | None = None

    @property
    def sequences(self) -> dict[RequestKey, Sequence]:
        """Every generation this worker has a part in."""
        return self.generations.sequences

    # --- router

    def on_router_message(self, now_ms: int, message: ToWorkerMessage) -> list[WorkerAction]:
        """Start or end a generation."""
        if isinstance(message, Cancel):
            self._cancel(message.key, message.reason)
            return self._take_without_reports()
        self._submit(now_ms, message)
        return self._out.take()

    def on_router_lost(self, now_ms: int) -> list[WorkerAction]:
        """Nobody reads the answers any more: end everything."""
        for key in list(self.sequences):
            self._cancel(key, "router lost")
        return self._take_without_reports()

    def _submit(self, now_ms: int, submit: Submit) -> None:
        """Start a generation; a repeated submit changes nothing."""
        if submit.key in self.sequences:
            return
        if rejection := rejection_of(submit, self.limits, self.kv):
            self._out.add(ToRouter(PartEnded(submit.key, EndReason.REJECTED, rejection)))
            return
        seq = self.generations.add(now_ms, submit)
        if submit.role is Role.DECODE:
            self.decode_side.begin(now_ms, seq)
            return
        if submit.peer is not None:
            self._out.add(ConnectPeer(submit.peer))
        if submit.pull is not None:
            self._out.add(ConnectPeer(submit.pull.owner))
        self.queue(seq)

    def _cancel(self, key: RequestKey, reason: str) -> None:
        seq = self.sequences.get(key)
        if seq is not None:
            self._end(seq, EndReason.CANCELLED, reason)
        else:  # the prefill part may be over and only its lease be left
            self.prefill_side.end_lease(key, reason)

    def _take_without_reports(self) -> list[WorkerAction]:
        """The actions of a cancel: the router, which sent it, gets no report."""
        return [action for action in self._out.take() if not isinstance(action, ToRouter)]

    # --- peers

    def on_peer_message(
        self, now_ms: int, sender: Incarnation, message: PeerMessage
    ) -> list[WorkerAction]:
        """Handle another worker's message; unknown or ended generations change nothing."""
        match message:
            case Reserve():
                self.decode_side.on_reserve(now_ms, sender, message)
            case Reserved():
                self.prefill_side.on_reserved(now_ms, sender, message)
            case Release():
                self.decode_side.on_release(sender, message)
            case Offers(request_number=None):
                self.inbound.on_offers(now_ms, sender, message)
            case Offers():
                self.lease_requests.on_offers(now_ms, sender, message)
            case LeaseRefused():
                self.lease_requests.on_refused(now_ms, sender, message)
            case ReadProgress():
                self.leases.on_read_progress(now_ms, sender, message)
            case CommitAnswer():
                self.inbound.on_commit_answer(now_ms, sender, message)
            case AskOffers():
                self.leases.on_ask(sender, message)
            case Commit():
                self.leases.on_commit(sender, message)
            case CommitSeen():
                self.leases.on_seen(sender, message)
            case AskLease():
                self.prefix_lender.on_ask_lease(now_ms, sender, message)
            case TakeOver():
                self.prefill_side.on_take_over(now_ms, sender, message)
            case WithdrawLease():
                self._doubt(sender, message.reason)
                self.lease_answers.on_withdraw(sender, message)
            case Ended():
                self._doubt(sender, message.reason)
                self._peer_ended(sender, message)
            case WrongEpoch():
                pass  # The addressee is another life of that worker: ours is gone.
        return self._out.take()

    def on_peer_lost(self, now_ms: int, peer: Incarnation) -> list[WorkerAction]:
        """A stream's end or a new epoch counts as the peer's abort of everything with it."""
        if any(lease.reader == peer for lease in self.leases.statuses()):
            # Perhaps it ended because its READs from here did not.
            self._out.add(CheckTransport(f"{peer} was lost while it read from here"))
        self.prefill_side.on_peer_lost(peer)
        self.lease_answers.on_peer_lost(peer)
        self.leases.on_peer_lost(now_ms, peer)
        self.lease_requests.on_peer_lost(now_ms, peer)
        self.inbound.on_peer_lost(now_ms, peer)
        self.decode_side.on_peer_lost(peer)
        for seq in list(self.sequences.values()):
            if seq.role is Role.PREFILL and seq.peer.incarnation == peer:
                self._end(seq, EndReason.PEER_LOST, f"{peer} was lost")
        return self._out.take()

    def _peer_ended(self, sender: Incarnation, message: Ended) -> None:
        """The peer of a hand-over ended its part; anybody else changes nothing."""
        seq = self.sequences.get(message.key)
        if seq is None:
            self.leases.on_ended(sender, message)
        elif seq.submit.peer is None or seq.submit.peer.incarnation != sender:
            return
        elif seq.role is Role.PREFILL or self.decode_side.find(seq.key) is not None:
            # A decode worker that has committed needs the prefill worker's part no more.
            self._end(seq, EndReason.PEER_ENDED, message.reason, tell_peer=False)

    def _doubt(self, reader: Incarnation, reason: str) -> None:
        """A reader's READs failed. It looks at its own transport; ours may be at fault as well."""
        if reason in READ_FAULTS:
            self._out.add(CheckTransport(f"{reader} reported {reason}"))

    # --- engine

    def next_step(self, now_ms: int) -> tuple[Step | None, list[WorkerAction]]:
        """The next batch, or None when there is nothing to compute or none may be launched."""
        if not self.batcher.may_launch:
            return None, []
        num_elsewhere = self.generations.num_holding - len(self.batcher.running)
        for seq in self.batcher.take_startable(num_elsewhere, self.prefix_pull.reserve):
            if seq.phase is Phase.PULLING_PREFIX:
                self.prefix_pull.ask(now_ms, seq)
            else:
                self.prefill_side.start(now_ms, seq)
        step, preempted = self.batcher.build_step()
        for seq in preempted:
            if seq.role is Role.PREFILL:
                self.prefill_side.give_back(seq, "preempted")
            else:
                seq.preempted = True
            self.queue(seq)
        return step, self._out.take()

    def on_step_done(self, now_ms: int, result: StepResult) -> list[WorkerAction]:
        """Account for a finished step: publish, sample, finish, hand over."""
        step, sequences = self.batcher.complete(result.step_id)
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
                self._end(seq, EndReason.STEP_FAILED, result.error)
                continue
            seq.num_computed = num_computed
            sample = result.samples[i]
            if sample is not None and sample.error:
                self._end(seq, EndReason.NO_TOKEN, sample.error)
            elif sample is not None:
                outputs.append(self._sampled(now_ms, seq, sample))
            else:
                self._computed(now_ms, seq)
        if outputs:  # after the prefill reports, which belong to the first token's usage
            self._out.add(ToRouter(StepOutputs(tuple(outputs))))
        return self._out.take()

    def _computed(self, now_ms: int, seq: Sequence) -> None:
        """A chunk is computed, more follow: offer it, and show those who wait that it goes on."""
        due = seq.shows_progress(now_ms, self.limits.progress_ms)
        if seq.role is Role.PREFILL:
            self.prefill_side.offer(now_ms, seq, renew=due)
        if due:
            self._out.add(ToRouter(PrefillProgress(seq.key, seq.num_computed)))

    def _sampled(self, now_ms: int, seq: Sequence, sample: SampledToken) -> SequenceOutput:
        """A step sampled a token: go on, finish, or hand over."""
        output = self.generations.emit(seq, sample)
        self.kv.unpromise(seq.key)  # the prompt is complete; from here on memory is requested
        if not seq.prefill_reported:
            seq.prefill_reported = True
            self._out.add(ToRouter(seq.prefill_report()))
        if output.finish_reason is not FinishReason.NONE:
            if seq.role is Role.PREFILL:
                self.prefill_side.give_back(seq, "token 0 ended the request")
            self.generations.forget(seq)
        elif seq.role is Role.PREFILL:
            self.prefill_side.seal(now_ms, seq, sample)
        return output

    # --- transfer shell

    def on_read_done(self, now_ms: int, read_id: int, error: str) -> list[WorkerAction]:
        """Every handle of a READ is terminal."""
        self.inbound.on_read_done(now_ms, read_id, error)
        return self._out.take()

    # --- time

    def tick(self, now_ms: int) -> list[WorkerAction]:
        """Time-outs, repeats and retries that are due."""
        self.prefill_side.tick(now_ms)
        self.lease_requests.tick(now_ms)
        self.inbound.tick(now_ms)
        self.decode_side.tick(now_ms)
        self._drain(now_ms)
        return self._out.take()

    def _drain(self, now_ms: int) -> None:
        """Not ready any more: let what goes on here end, for a bounded time, then exit."""
        if self.ready:
            self._drain_until_ms = None
            return
        if self._drain_until_ms is None:
            self._drain_until_ms = now_ms + self.limits.drain_ms
        if now_ms >= self._drain_until_ms or not (self.sequences or self.leases.num_live):
            self._out.add(Exit("READs that may still land hold too much of the pool"))

    @property
    def ready(self) -> bool:
        """READs that may still land hold no more of the pool than they may."""
        return self.admission.ready

    # --- inside

    def queue(self, seq: Sequence) -> None:
        """Let a sequence that holds nothing wait for its turn."""
        num_queued = len(self.batcher.waiting) + len(self.prefill_side.backing_off)
        if num_queued >= self.limits.max_waiting and not seq.preempted:
            self._end(seq, EndReason.CAPACITY, "the queue is full")
        elif num_blocks_for(self.kv, seq.num_tokens) > self.kv.num_usable_blocks:
            self._end(seq, EndReason.REJECTED, "it has outgrown the pool")
        else:
            self.batcher.enqueue(seq)

    def _end(
        self, seq: Sequence, reason: EndReason, message: str, *, tell_peer: bool = True
    ) -> None:
        """End this worker's part: give everything back, inform the peer and the router."""
        self.prefix_pull.end(seq.key, reason)
        if seq.role is Role.PREFILL:
            self.prefill_side.end(seq, reason, message, tell_peer=tell_peer)
        elif seq.role is Role.DECODE:
            self.decode_side.end(seq, reason, message, tell_peer=tell_peer)
        else:
            self.generations.end(seq, reason, message)
