"""A worker process of the simulated world: the production core over a symbolic engine."""

from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Protocol

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.kv_events import KVEvent
from disagg.messages.peer import PeerMessage
from disagg.messages.registration import Contract, WorkerInfo
from disagg.messages.session import ToRouterMessage, ToWorkerMessage, receipt_of
from disagg.messages.stats import WorkerStats
from disagg.messages.submit import Submit
from disagg.scheduling.actions import ClearTier, Exit, ReadTier, ToRouter, WorkerAction, WriteTier
from disagg.scheduling.admission import handover_tokens_max, served_tokens_max
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import WorkerLimits
from disagg.scheduling.stats import check_load, group_infos, worker_stats
from disagg.scheduling.step import Step
from disagg.scheduling.step_pace import StepPace
from disagg.testing.simulation.bounds import check_step
from disagg.testing.simulation.config import SimulationConfig
from disagg.testing.simulation.symbolic_engine import SymbolicEngine, SymbolicMemory
from disagg.testing.simulation.symbolic_reads import (
    checksum_of,
    flipped,
    part_of,
    read_part,
    symbolic_forms,
)
from disagg.testing.simulation.symbolic_tier import SimulatedTier, SymbolicStore
from disagg.testing.simulation.tier_copies import TierCopies
from disagg.testing.simulation.worker_faults import expire_leases, preempt_youngest
from disagg.transfer.actions import ComputeChecksums, PostRead, Send
from disagg.transfer.read_plan import ByteRange, ReadPlan, plan_reads


class World(Protocol):
    """What a worker sees of the world around it."""

    config: SimulationConfig
    hasher: BlockHasher
    now_ms: int
    num_flips: int
    """Blocks that came with flipped bits."""

    def draw(self, low: int, high: int) -> int:
        """A seeded random number, both ends included."""

    def later(self, delay_ms: int, event: "Event") -> None:
        """Let something happen after a delay."""

    def event(self, delay_ms: int, happen: "Event") -> None:
        """The same, for what a planned fault may come before."""

    def read_fault(self, reader: "WorkerModel", read: PostRead) -> str:
        """Why a READ that is posted now will fail, or ""."""

    def computed(self, key: RequestKey, num_tokens: int) -> None:
        """A step has computed so many positions of a generation."""

    def has_read(self, key: RequestKey) -> None:
        """A READ of a generation has ended well."""

    def to_router(self, sender: Incarnation, message: ToRouterMessage) -> None:
        """Send on the session."""

    def to_peer(self, sender: Incarnation, to: Incarnation, message: PeerMessage) -> None:
        """Send on a peer stream."""

    def store(self, worker: str, tier: SimulatedTier) -> SymbolicStore:
        """The blocks of one of the worker's tiers."""

    def find(self, incarnation: Incarnation) -> "WorkerModel | None":
        """The living worker of that incarnation."""

    def info_of(self, incarnation: Incarnation) -> WorkerInfo:
        """Registration of a worker that lives or lived."""


class Event(Protocol):
    """Something that happens at a moment."""

    def __call__(self) -> None:
        """Let it happen."""


class WorkerModel:
    """One incarnation; dead ones do nothing any more."""

    def __init__(self, world: World, me: Incarnation, role: str, layout: KVCacheLayout) -> None:
        config = world.config
        self._layout = layout
        self._plans: dict[Incarnation, ReadPlan | None] = {}
        """How blocks of those whose messages arrived are read."""
        self.me = me
        self.role = role
        self.alive = True
        self._world = world
        self._kv_sequence = 0
        self._preemption_due = False
        self._launched: deque[tuple[Step, int]] = deque()
        """Steps in flight, and how long each one takes; the first one runs."""
        self._pace = StepPace(config.max_step_tokens)
        self._stalled_until_ms = 0
        self.memory = SymbolicMemory(config.num_blocks)
        self._engine = SymbolicEngine(layout, self.memory, config.vocab_size)
        limits = WorkerLimits(
            max_model_tokens=config.prompt_tokens_max + config.output_tokens_max + 1,
            max_step_tokens=config.max_step_tokens,
            max_sequences=config.max_sequences,
            max_waiting=config.max_waiting,
            handover_share_max=config.handover_share_max,
            reserve_timeout_ms=config.reserve_timeout_ms,
            reserve_passes_max=config.reserve_passes_max,
            reservation_ttl_ms=config.reservation_ttl_ms,
            lease_ttl_ms=config.lease_ttl_ms,
            committed_max=16,
            commit_repeat_ms=config.commit_repeat_ms,
            read_stuck_ms=config.read_stuck_ms,
            steps_max=config.steps_max,
            blocks_per_read_max=config.blocks_per_read_max,
            quarantine_share_max=1.0,
            take_over_ms=config.take_over_ms,
            checksums=config.checksums,
            blocks_per_tier_copy_max=config.blocks_per_tier_copy_max,
        )
        kv = KVCacheCoordinator(
            layout,
            config.num_blocks,
            max_model_tokens=limits.max_model_tokens,
            max_step_tokens=limits.steps_max * limits.max_step_tokens,
            steps_max=limits.steps_max,
            num_lookahead_tokens=config.num_speculative_tokens,
            policy=config.cache_policy,
        )
        self.core = WorkerCore(
            me,
            layout,
            kv,
            world.hasher,
            limits,
            lambda passes: world.draw(5, 60 * min(passes, 10)),
            tuple(one.setting(world.store(me.worker_id, one)) for one in config.tiers),
        )
        self._tier_copies = TierCopies(world, self, self._perform)
        self.info = self._registration()

    def _registration(self) -> WorkerInfo:
        layout, core = self._layout, self.core
        return WorkerInfo(
            self.me,
            "simulated:1",
            self.role,
            "symbolic",
            Contract(
                "symbolic",
                "none",
                (),
                "symbolic",
                0,
                layout.hash_block_tokens,
                "simulation",
                1,
                1,
                forms=symbolic_forms(layout),
            ),
            group_infos(layout),
            served_tokens_max(core.limits, core.kv),
            handover_tokens_max(core.limits, core.kv),
            core.kv.num_usable_blocks,
            core.tiers.infos,
        )

    def stats(self) -> WorkerStats:
        """Load as of now."""
        return worker_stats(self.core, step_times=self._pace.step_times)

    def at_rest(self) -> bool:
        """Nothing is held and nothing is going on."""
        kv = self.core.kv
        return (
            not self.core.sequences
            and not self.core.batcher.num_in_flight
            and kv.num_free_blocks == kv.num_available_blocks == kv.num_usable_blocks
            and self.core.budget.num_blocks == 0
        )

    def kv_events(self) -> tuple[int, Sequence[KVEvent]]:
        """Number of the first, and events, since the last call."""
        batch = self.core.kv.events.since(self._kv_sequence)
        if batch is None:
            return self._kv_sequence, ()
        self._kv_sequence = batch.next_seq
        return batch.first_seq, batch.events

    # --- events

    def on_router_message(self, message: ToWorkerMessage) -> None:
        """A submit or cancel arrived."""
        if self.alive:
            if isinstance(message, Submit):
                self._world.to_router(self.me, receipt_of(message))
            self._perform(self.core.on_router_message(self._world.now_ms, message))

    def on_peer_message(self, sender: Incarnation, message: PeerMessage) -> None:
        """Another worker's message arrived."""
        if self.alive:
            if sender not in self._plans:
                contract = self._world.info_of(sender).contract
                plan = self._plans[sender] = plan_reads(contract, self.info.contract)
                self.core.on_peer_known(sender, plan)
            self._perform(self.core.on_peer_message(self._world.now_ms, sender, message))

    def on_peer_lost(self, peer: Incarnation) -> None:
        """A stream to or from the peer ended."""
        if self.alive:
            self._plans.pop(peer, None)
            self._perform(self.core.on_peer_lost(self._world.now_ms, peer))

    def tick(self) -> None:
        """Time went by."""
        self._perform(self.core.tick(self._world.now_ms))

    def expire_leases(self) -> None:
        """The time to live of every lease is over."""
        expire_leases(self.core, self._world.now_ms)
        self.tick()

    def preempt(self) -> None:
        """The youngest that runs loses its blocks, when the steps in flight are over."""
        if self.core.batcher.num_in_flight:
            self._preemption_due = True
            self.core.batcher.let_steps_end()
        else:
            self._perform(preempt_youngest(self.core))

    def stall(self, stall_ms: int) -> None:
        """Its engine stands still for so long."""
        self._stalled_until_ms = self._world.now_ms + stall_ms

    # --- carrying out

    def _perform(self, actions: Iterable[WorkerAction]) -> None:
        for action in actions:
            match action:
                case ToRouter(message):
                    self._world.to_router(self.me, message)
                case Send(to, peer_message):
                    self._world.to_peer(self.me, to, peer_message)
                case PostRead():
                    self._read(action)
                case ComputeChecksums():
                    self._checksum(action)
                case WriteTier() | ReadTier():
                    self._tier_copies.begin(action)
                case ClearTier(tier):
                    self._tier_copies.clear(tier)
                case Exit(reason):
                    raise AssertionError(f"{self.me} would exit: {reason}")
                case _:
                    pass  # links are always there
        now_ms = self._world.now_ms
        if wait_ms := ceil(self._pace.wait_ms(now_ms)):
            self._world.event(wait_ms, self._plan)
            return
        step, more = self.core.next_step(now_ms)
        if step is not None:
            self._pace.launched(now_ms, step)
            self._engine.prepare(step)
            config = self._world.config
            num_tokens = check_step(step, config)
            delay_ms = self._world.draw(1, config.step_ms_max)
            delay_ms += num_tokens * config.step_token_us // 1_000
            self._launched.append((step, delay_ms))
            if len(self._launched) == 1:
                self._world.event(delay_ms, self._run)
        if more or step is not None:
            self._perform(more)
        check_load(self.core)

    def _plan(self) -> None:
        """The next step is due to be planned."""
        if self.alive:
            self._perform(())

    def _run(self) -> None:
        """The step that ran is over, and the next one runs."""
        wait_ms = self._stalled_until_ms - self._world.now_ms
        if wait_ms > 0:
            self._world.later(wait_ms, self._run)
        elif self.alive:
            step, _ = self._launched.popleft()
            self._pace.done(self._world.now_ms)
            if self._launched:
                self._world.event(self._launched[0][1], self._run)
            for part in step.slices:
                num_known = len(part.token_ids) - part.num_drafts
                self._world.computed(part.key, part.start + num_known)
            actions = self.core.on_step_done(self._world.now_ms, self._engine.run(step))
            if self._preemption_due and not self.core.batcher.num_in_flight:
                self._preemption_due = False
                actions += preempt_youngest(self.core)
            self._perform(actions)

    def _read(self, read: PostRead) -> None:
        """Copy block by block, each at a time of its own, from whatever is there then."""
        owner = self._world.find(read.owner)
        error = "" if owner is not None else "owner is gone"
        error = self._world.read_fault(self, read) or error
        last = 0
        if owner is not None:
            plan = plan_reads(owner.info.contract, self.info.contract)
            assert bool(read.parts) == (plan is not None), f"{read} of {owner.info.contract}"
            for number, (src, dst) in enumerate(zip(read.src_blocks, read.dst_blocks, strict=True)):
                delay = self._world.draw(0, self._world.config.read_ms_max)
                last = max(last, delay)
                ranges = None if plan is None else part_of(plan, *read.parts[number])
                self._copy_later(owner, src, dst, ranges, delay, torn=bool(error))
        self._world.event(last + 1, lambda: self._read_done(read, error))

    def _copy_later(
        self,
        owner: "WorkerModel",
        src: int,
        dst: int,
        ranges: Sequence[ByteRange] | None,
        delay_ms: int,
        *,
        torn: bool,
    ) -> None:
        flips_per_mille = self._world.config.bit_flips_per_mille
        flips = flips_per_mille and self._world.draw(1, 1000) <= flips_per_mille

        def copy() -> None:
            if not (self.alive and owner.alive):
                return
            cells = owner.memory.blocks[src]
            if flips and cells:
                cells = flipped(cells)
                self._world.num_flips += 1
            if ranges is None:
                taken = list(cells.items())
                self.memory.blocks[dst] = dict(taken[: len(taken) // 2] if torn else taken)
            else:
                read_part(cells, self.memory.blocks[dst], ranges[: 0 if torn else None])

        self._world.later(delay_ms, copy)

    def _checksum(self, wanted: ComputeChecksums) -> None:
        """Compute checksums at some time, of what is there then."""

        def known() -> None:
            if self.alive:
                now_ms, blocks = self._world.now_ms, self.memory.blocks
                checksums = [checksum_of(blocks[block]) for block in wanted.blocks]
                self._perform(self.core.on_checksums(now_ms, wanted.request_id, checksums))

        self._world.later(self._world.draw(0, self._world.config.read_ms_max), known)

    def _read_done(self, read: PostRead, error: str) -> None:
        if not self.alive:
            return
        if self._world.find(read.owner) is None:
            error = "owner died"
        if not error:
            self._world.has_read(read.key)
        self._perform(self.core.on_read_done(self._world.now_ms, read.read_id, error))
