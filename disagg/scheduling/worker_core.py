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
from disagg.kv.prefix_sharing import PrefixSharing
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.outputs import SequenceOutput, StepOutputs
from disagg.messages.peer import (
    AskLease,
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
    TakeOver,
    WithdrawLease,
    WrongEpoch,
)
from disagg.messages.session import Cancel, EndReason, Role, ToWorkerMessage
from disagg.scheduling.actions import CheckTransport, Exit, ToRouter, WorkerAction
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.counters import Counters
from disagg.scheduling.incoming import Incoming
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.outgoing import Outgoing, peer_of
from disagg.scheduling.parts import Parts
from disagg.scheduling.prefix_reader import PrefixReader
from disagg.scheduling.sequence import Phase, Sequence
from disagg.scheduling.share import HandoverShare
from disagg.scheduling.step import Step, StepResult
from disagg.transfer.actions import READ_FAULTS
from disagg.transfer.inbound import InboundTable
from disagg.transfer.lease_asker import LeaseAsker
from disagg.transfer.leases import LeaseTable


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
        self.share = HandoverShare(int(limits.handover_share_max * coordinator.num_usable_blocks))
        self.batcher = Batcher(coordinator, limits)
        self.leases = LeaseTable(
            me,
            coordinator.pool,
            ttl_ms=limits.lease_ttl_ms,
            committed_max=limits.committed_max,
            take_over_ms=limits.take_over_ms,
        )
        self.inbound = InboundTable(
            me,
            coordinator.pool,
            commit_repeat_ms=limits.commit_repeat_ms,
            ask_repeat_ms=limits.commit_repeat_ms,
            read_stuck_ms=limits.read_stuck_ms,
            blocks_per_read_max=limits.blocks_per_read_max,
        )
        prefixes = PrefixSharing(coordinator)
        self.counters = Counters()
        self.outgoing = Outgoing(
            coordinator,
            prefixes,
            self.leases,
            self.share,
            limits,
            random_delay_ms,
            self.counters,
        )
        asker = LeaseAsker(
            timeout_ms=limits.reserve_timeout_ms,
            ttl_ms=limits.reservation_ttl_ms,
            repeat_ms=limits.commit_repeat_ms,
        )
        self.incoming = Incoming(coordinator, prefixes, self.inbound, asker, self.share, limits)
        self.prefixes = PrefixReader(
            coordinator, prefixes, self.inbound, asker, self.batcher, self.counters
        )
        self.parts = Parts(
            coordinator,
            hasher,
            limits,
            self.batcher,
            self.outgoing,
            self.incoming,
            self.prefixes,
            self.inbound,
            asker,
            self.counters,
        )

    @property
    def sequences(self) -> dict[RequestKey, Sequence]:
        """Every generation this worker has a part in."""
        return self.parts.sequences

    # --- router

    def on_router_message(self, now_ms: int, message: ToWorkerMessage) -> list[WorkerAction]:
        """Start or end a generation."""
        if isinstance(message, Cancel):
            return self.parts.cancel(now_ms, message.key, message.reason)
        return self.parts.submit(now_ms, message)

    def on_router_lost(self, now_ms: int) -> list[WorkerAction]:
        """Nobody reads the answers any more: end everything."""
        actions: list[WorkerAction] = []
        for key in list(self.sequences):
            actions += self.parts.cancel(now_ms, key, "router lost")
        return actions

    # --- peers

    def on_peer_message(
        self, now_ms: int, sender: Incarnation, message: PeerMessage
    ) -> list[WorkerAction]:
        """Handle another worker's message; unknown or ended generations change nothing."""
        match message:
            case Reserve():
                refusal = self._refuses_reservations(sender)
                return self.parts.act_on(
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
                return self.parts.act_on(now_ms, self.incoming.on_release(now_ms, sender, message))
            case Offers(number=0):
                return self.parts.act_on(now_ms, self.inbound.on_offers(now_ms, sender, message))
            case Offers():
                return self.parts.on_answer(now_ms, sender, message)
            case AskLease():
                refuse = self.batcher.preempted_waiting
                return list(self.outgoing.on_open(now_ms, sender, message, refuse=refuse))
            case TakeOver():
                return list(self.outgoing.on_transfer(now_ms, sender, message))
            case WithdrawLease():
                doubts = _doubts(sender, message.reason)
                return [*doubts, *self.outgoing.on_withdraw(sender, message)]
            case CommitAnswer():
                return self.parts.act_on(
                    now_ms, self.inbound.on_commit_answer(now_ms, sender, message)
                )
            case AskOffers() | Commit() | CommitSeen():
                return list(self.outgoing.on_lease_message(sender, message))
            case Ended():
                doubts = _doubts(sender, message.reason)
                return [*doubts, *self.parts.peer_ended(now_ms, sender, message)]
            case WrongEpoch():
                # The addressee is another life of that worker: ours is gone.
                return []

    def on_peer_lost(self, now_ms: int, peer: Incarnation) -> list[WorkerAction]:
        """A stream's end or a new epoch counts as the peer's abort of everything with it."""
        actions: list[WorkerAction] = []
        if any(lease.reader == peer for lease in self.leases.statuses()):
            # Perhaps it ended because its READs from here did not.
            actions.append(CheckTransport(f"{peer} was lost while it read from here"))
        actions += self.outgoing.on_peer_lost(now_ms, peer)
        actions += self.parts.on_owner_lost(now_ms, peer)
        actions += self.parts.act_on(now_ms, self.inbound.on_peer_lost(now_ms, peer))
        for seq in self.incoming.owned_by(peer):
            actions += self.parts.end(now_ms, seq, EndReason.PEER_LOST, f"{peer} was lost")
        for seq in list(self.sequences.values()):
            if seq.role is Role.PREFILL and peer_of(seq).incarnation == peer:
                actions += self.parts.end(now_ms, seq, EndReason.PEER_LOST, f"{peer} was lost")
        return actions

    # --- engine

    def next_step(self, now_ms: int) -> tuple[Step | None, list[WorkerAction]]:
        """The next batch, or None when there is nothing to compute or one is in flight."""
        actions: list[WorkerAction] = []
        if self.batcher.step_in_flight:
            return None, actions
        num_elsewhere = self._num_holding - len(self.batcher.running)
        for seq in self.batcher.take_startable(num_elsewhere, self.prefixes.reserve):
            if seq.phase is Phase.PULLING_PREFIX:
                actions += self.parts.act_on(now_ms, self.prefixes.ask(now_ms, seq))
            else:
                actions += self.parts.start(now_ms, seq)
        step, preempted = self.batcher.build_step()
        for seq in preempted:
            if seq.role is Role.PREFILL:
                actions += self.outgoing.give_back(seq, "preempted")
            else:
                seq.preempted = True
            actions += self.parts.queue(now_ms, seq)
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
                actions += self.parts.end(now_ms, seq, EndReason.STEP_FAILED, result.error)
                continue
            seq.num_computed = num_computed
            sample = result.samples[i]
            if sample is not None:
                actions += self.parts.sampled(now_ms, seq, sample, outputs)
            elif seq.role is Role.PREFILL:
                actions += self.outgoing.offer(now_ms, seq)
        if outputs:  # after the prefill reports, which belong to the first token's usage
            actions.append(ToRouter(StepOutputs(tuple(outputs))))
        return actions

    # --- transfer shell

    def on_read_done(self, now_ms: int, read_id: int, error: str) -> list[WorkerAction]:
        """Every handle of a READ is terminal."""
        return self.parts.act_on(now_ms, self.inbound.on_read_done(now_ms, read_id, error))

    # --- time

    def tick(self, now_ms: int) -> list[WorkerAction]:
        """Time-outs, repeats and retries that are due."""
        out, ready = self.outgoing.tick(now_ms)
        actions: list[WorkerAction] = list(out)
        for key, lease_id in self.outgoing.take_ended_leases():
            actions += self.parts.lease_ended(now_ms, key, lease_id)
        for seq in ready:
            if seq.passes > self.limits.reserve_passes_max:
                actions += self.parts.end(
                    now_ms, seq, EndReason.RESERVE_REFUSED, f"refused {seq.passes} times"
                )
            else:
                self.batcher.enqueue(seq)
        actions += self.parts.tick(now_ms)
        actions += self.parts.act_on(now_ms, self.inbound.tick(now_ms))
        for seq in self.incoming.expired(now_ms):
            actions += self.parts.end(now_ms, seq, EndReason.EXPIRED, "no hand-over in time")
        if not self.ready:
            actions.append(Exit("READs that may still land hold too much of the pool"))
        return actions

    @property
    def ready(self) -> bool:
        """READs that may still land hold no more of the pool than they may."""
        quarantine_max = self.limits.quarantine_share_max * self.kv.num_usable_blocks
        return self.inbound.num_blocks_quarantined <= quarantine_max

    # --- inside

    @property
    def _num_holding(self) -> int:
        """Sequences that hold blocks, wherever they are."""
        elsewhere = len(self.outgoing.reserving) + len(self.incoming.pulls)
        return len(self.batcher.running) + elsewhere + len(self.prefixes.pulls)

    def _refuses_reservations(self, sender: Incarnation) -> str:
        if self.batcher.preempted_waiting:
            return "an older request waits for memory"
        if sender in self.inbound.peers_paused:
            return "a READ from there is stuck"
        if self._num_holding - len(self.outgoing.reserving) >= self.limits.max_sequences:
            return "too many sequences"
        return ""


def _doubts(reader: Incarnation, reason: str) -> list[WorkerAction]:
    """A reader's READs failed. It looks at its own transport; ours may be at fault as well."""
    return [CheckTransport(f"{reader} says {reason}")] if reason in READ_FAULTS else []
