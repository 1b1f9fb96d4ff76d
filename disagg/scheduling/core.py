"""Everything a worker decides, without a clock, a socket or a tensor.

The shell feeds events in, one at a time and in order, and carries out the returned actions in
order:

- `on_router_message` for what a router's stream brings, `on_router_lost` when it ends;
- `on_peer_known` before the first message of a peer whose blocks are not like this worker's,
  `on_peer_message` for other workers' messages, `on_peer_lost` when a stream to or from an
  incarnation ends or its epoch changed;
- `next_step` after every event until there is none, or later (`StepPace`), `on_step_done` when a
  step has ended, in the order of their launch;
- `on_read_done` exactly once for every `PostRead`, `on_checksums` for every `ComputeChecksums`,
  `on_tier_written` for every `WriteTier`, `on_tier_read` for every `ReadTier`, `on_tier_cleared`
  for every `ClearTier`;
- `tick` every few milliseconds;
- `drain` when the process is asked to end: `Drained` follows.

Only one thread may call it.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import PeerMessage
from disagg.messages.session import (
    CallOffDrain,
    Cancel,
    Claim,
    Drain,
    EndReason,
    PartEnded,
    ResetPrefixCache,
    Superseded,
    ToWorkerMessage,
    WorkerIdClaimed,
)
from disagg.messages.submit import Role, Submit
from disagg.scheduling.actions import (
    CheckTransport,
    ConnectPeer,
    Drained,
    Exit,
    TierKey,
    ToRouter,
    WorkerAction,
)
from disagg.scheduling.admission import rejection_of
from disagg.scheduling.cache_reset import reset_prefix_cache
from disagg.scheduling.claims import Claims, same_request
from disagg.scheduling.draining import DrainEvent, Draining
from disagg.scheduling.handover.decode_side import DecodeSide
from disagg.scheduling.handover.moving import Moving
from disagg.scheduling.handover.prefill_side import PrefillSide
from disagg.scheduling.handover.prefix_lending import PrefixLender
from disagg.scheduling.handover.prefix_pull import PrefixPullSide
from disagg.scheduling.handover.worker_state import create_state
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.parts import Parts
from disagg.scheduling.peer_side import PeerSide
from disagg.scheduling.sequence import Phase, Sequence
from disagg.scheduling.step import Step, StepResult
from disagg.scheduling.step_side import StepSide
from disagg.scheduling.tiers.index import TierSetting
from disagg.scheduling.tiers.tier_side import TierSide
from disagg.transfer.read_plan import ReadPlan


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
        tiers: tuple[TierSetting, ...] = (),
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
        self._checksums = worker.checksums
        self.prefill_side = PrefillSide(worker, random_delay_ms)
        self.decode_side = DecodeSide(worker)
        self.prefix_pull = PrefixPullSide(worker, self.prefill_side)
        self.prefix_lender = PrefixLender(worker)
        self.tiers = TierSide(worker, self.prefill_side, self.prefix_lender, tiers)
        self.parts = Parts(
            worker, self.prefill_side, self.decode_side, self.prefix_pull, self.tiers
        )
        self._peers = PeerSide(worker, self.parts, self.prefill_side, self.decode_side, self.tiers)
        self._moving = Moving(worker, self.prefill_side, self.parts)
        self._steps = StepSide(worker, self.parts, self.prefill_side, self.prefix_pull, self.tiers)
        self._draining = Draining(limits.drain_ms)
        self._claims = Claims()

    @property
    def sequences(self) -> dict[RequestKey, Sequence]:
        """Every generation this worker has a part in."""
        return self.generations.sequences

    # --- routers

    def on_router_message(self, now_ms: int, message: ToWorkerMessage) -> list[WorkerAction]:
        """Start or end a generation, let one request take another's place, or forget the cache."""
        match message:
            case Cancel(key, reason):
                self._cancel(key, reason)
                return self._take_without_reports()
            case ResetPrefixCache():
                self.tiers.clear(now_ms)
                self.tiers.answer(reset_prefix_cache(self.kv, self.sequences.values(), message))
            case WorkerIdClaimed():
                self.counters.add("worker_id_claims")
            case Submit():
                self._submit(now_ms, message)
            case Claim():
                return self._claim(now_ms, message)
            case Drain():
                self.drain(now_ms, message.timeout_ms, ends=message.ends)
            case CallOffDrain():
                self._draining.call_off()
        return self._out.take()

    def on_router_lost(self, now_ms: int, router: str = "") -> list[WorkerAction]:
        """Nobody reads the answers to this router any more: end all that it asked for."""
        self.tiers.forget_answer(router)
        self._claims.router_lost(router)
        for key in self._parts_of(lambda key: key.router == router):
            self._cancel(key, "router lost")
        return self._take_without_reports()

    def _claim(self, now_ms: int, claim: Claim) -> list[WorkerAction]:
        """End the earlier one of two requests of one name."""
        superseded = self._claims.take(now_ms, claim)
        if superseded is None:
            return []
        for key in self._parts_of(lambda key: same_request(key, superseded)):
            self._cancel(key, "superseded")
        self.counters.add("requests_superseded")
        return [*self._take_without_reports(), ToRouter(Superseded(superseded))]

    def _parts_of(self, concerned: Callable[[RequestKey], bool]) -> list[RequestKey]:
        """Generations that have a part here, or a live lease left from one."""
        known = dict.fromkeys((*self.sequences, *self.leases.handed_over))
        return [key for key in known if concerned(key)]

    def _submit(self, now_ms: int, submit: Submit) -> None:
        """Start a generation; a repeated submit changes nothing."""
        if submit.key in self.sequences:
            return
        if self.draining:  # it was sent before its router heard of that
            self._out.add(ToRouter(PartEnded(submit.key, EndReason.DRAINING, "the worker drains")))
            return
        if rejection := rejection_of(submit, self.limits, self.kv):
            self._out.add(ToRouter(PartEnded(submit.key, EndReason.REJECTED, rejection)))
            return
        seq = self.generations.add(now_ms, submit)
        self.tiers.prompt(seq)
        if submit.role is Role.DECODE:
            self.decode_side.begin(now_ms, seq)
            if seq.phase is Phase.AWAITING_RESERVE:
                self.tiers.prefetch(now_ms, seq)
            return
        for peer in submit.asks:
            self._out.add(ConnectPeer(peer))
        self.parts.queue(seq)
        self._steps.begin_elsewhere(now_ms)

    def _cancel(self, key: RequestKey, reason: str) -> None:
        seq = self.sequences.get(key)
        if seq is not None:
            self.parts.end(seq, EndReason.CANCELLED, reason)
        else:  # the prefill part may be over and only its lease be left
            self.prefill_side.end_lease(key, reason)

    def _take_without_reports(self) -> list[WorkerAction]:
        """The actions of a cancel: the router, which sent it, gets no report."""
        return [action for action in self._out.take() if not isinstance(action, ToRouter)]

    # --- peers

    def on_peer_known(self, peer: Incarnation, plan: ReadPlan | None) -> None:
        """A peer's contract is known, which goes before all its messages and never changes.

        Args:
            peer: the incarnation.
            plan: how its blocks are read; None: whole, as its blocks are like this worker's.
        """
        self._peers.known(peer, plan)

    def on_peer_message(
        self, now_ms: int, sender: Incarnation, message: PeerMessage
    ) -> list[WorkerAction]:
        """Handle another worker's message; unknown or ended generations change nothing."""
        self._peers.on_message(now_ms, sender, message)
        return self._out.take()

    def on_peer_lost(self, now_ms: int, peer: Incarnation) -> list[WorkerAction]:
        """A stream's end or a new epoch counts as the peer's abort of everything with it."""
        self._peers.lost(now_ms, peer)
        return self._out.take()

    # --- engine

    def next_step(self, now_ms: int) -> tuple[Step | None, list[WorkerAction]]:
        """The next batch, or None when there is nothing to compute or none may be launched."""
        step = None if self._draining.gave_up else self._steps.plan(now_ms)
        return step, self._out.take()

    def on_step_done(self, now_ms: int, result: StepResult) -> list[WorkerAction]:
        """Account for a finished step: publish, sample, finish, hand over."""
        self._steps.done(now_ms, result)
        return self._out.take()

    # --- transfer shell

    def on_read_done(self, now_ms: int, read_id: int, error: str) -> list[WorkerAction]:
        """Every handle of a READ is terminal."""
        self.inbound.on_read_done(now_ms, read_id, error)
        return self._out.take()

    def on_checksums(
        self, now_ms: int, request_id: int, checksums: SequenceOf[int]
    ) -> list[WorkerAction]:
        """The checksums of a `ComputeChecksums` are known, one per block."""
        num_before = self.inbound.num_mismatches
        self._checksums.on_computed(now_ms, request_id, checksums)
        if num_wrong := self.inbound.num_mismatches - num_before:
            self._out.add(CheckTransport(f"{num_wrong} blocks came with other checksums"))
        return self._out.take()

    def on_tier_written(
        self,
        now_ms: int,
        copy_id: int,
        stored: Collection[TierKey],
        evicted: Collection[TierKey],
    ) -> list[WorkerAction]:
        """A tier reads no more of a `WriteTier`; it has what is stored, and no more the evicted."""
        self.tiers.on_written(now_ms, copy_id, stored, evicted)
        return self._out.take()

    def on_tier_read(
        self, now_ms: int, copy_id: int, intact: Collection[bool]
    ) -> list[WorkerAction]:
        """A tier writes no more of a `ReadTier`; ``intact`` says which of its blocks are there."""
        self.tiers.on_read(now_ms, copy_id, intact)
        return self._out.take()

    def on_tier_cleared(self, now_ms: int, tier: str, error: str) -> list[WorkerAction]:
        """A tier has nothing any more, or may still have something because of ``error``."""
        self.tiers.on_cleared(now_ms, tier, error)
        return self._out.take()

    # --- time

    def tick(self, now_ms: int) -> list[WorkerAction]:
        """Time-outs, repeats and retries that are due."""
        if self.kv.pool.residency is not None:
            self.kv.pool.residency.now_ms = now_ms
        if self.prefill_side.tick(now_ms):
            self._steps.begin_elsewhere(now_ms)
        self.lease_requests.tick(now_ms)
        self.inbound.tick(now_ms)
        self.decode_side.tick(now_ms)
        self.tiers.tick(now_ms)
        idle = not (self.sequences or self.leases.num_live)
        match self._draining.due(now_ms, ready=self.ready, idle=idle):
            case DrainEvent.DRAINED if self.sequences:
                self._moving.end_all()  # routers hear of it; the next tick ends the worker
            case DrainEvent.DRAINED:
                self._out.add(Drained())
            case DrainEvent.EXIT:
                owners = ", ".join(sorted(one.worker_id for one in self.inbound.peers_paused))
                self._out.add(
                    Exit(
                        "READs that may still land hold too much of the pool; they are from"
                        f" {owners}: does the network let packets of full size (MTU) through?"
                    )
                )
            case DrainEvent.GIVE_UP:
                self._moving.move_all(now_ms)
        return self._out.take()

    def drain(self, now_ms: int, timeout_ms: int, *, ends: bool = True) -> None:
        """Take no new work; if the worker ends, `Drained` follows when nothing goes on any more.

        Until then KV is lent as ever. What still goes on shortly before ``timeout_ms`` are over
        ends, with a reason that lets its router plan it anew; what decodes leaves its KV for that.
        """
        self._draining.ask(now_ms, timeout_ms, ends=ends)

    @property
    def draining(self) -> bool:
        """It takes no new work, as it was asked to."""
        return self._draining.asked

    @property
    def ready(self) -> bool:
        """New work may come: READs that may still land hold not too much, and it does not drain."""
        return self.admission.ready and not self.draining
