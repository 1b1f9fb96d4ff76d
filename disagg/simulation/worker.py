"""A worker of the simulated fleet: the production core; around it time passes as was measured."""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from disagg.errors import ExpiredError, InvariantViolation
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.event_log import WAITING_EVENTS_MAX, KVEventLog
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import LAYOUT_VERSION
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import KVEvent
from disagg.messages.peer import PeerMessage
from disagg.messages.registration import WIRE_MAX, WIRE_MIN, Contract, WorkerInfo
from disagg.messages.sampling import SampledToken
from disagg.messages.session import ToRouterMessage, ToWorkerMessage, receipt_of
from disagg.messages.submit import Submit
from disagg.scheduling.actions import Exit, ToRouter, WorkerAction
from disagg.scheduling.admission import handover_tokens_max, served_tokens_max
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.stats import check_core, group_infos, worker_stats
from disagg.scheduling.step import Step, StepResult
from disagg.scheduling.step_meter import shape_of
from disagg.scheduling.step_pace import StepPace
from disagg.scheduling.told_stats import ToldStats
from disagg.simulation.fleet_plan import FleetPlan
from disagg.simulation.host import Host
from disagg.simulation.virtual_time import VirtualTime
from disagg.transfer.actions import PostRead, Send

TICK_MS = 10.0
SLOW_TICK_MS = 100.0
"""Where nobody waits for a retry: everything else that is due is far coarser."""
STATS_MS = 100.0
"""So often is looked whether the router has to have stats, as a worker's control does."""
ANSWER_TOKEN = 1 << 31
"""Tokens of answers are none of a prompt."""


class Surroundings(Protocol):
    """What a worker needs of the world."""

    plan: FleetPlan
    time: VirtualTime
    hasher: BlockHasher

    def retry_ms(self, passes: int) -> int:
        """A seeded delay after so many refused reservations."""

    def number_of(self, request_id: str) -> int:
        """A number of a request, other for every request."""

    @property
    def report_pace_ms(self) -> int:
        """What the router asks of workers; see `ReportPace.stats_ms`."""

    def to_router(self, sender: Incarnation, message: ToRouterMessage) -> None:
        """Send on the worker's session."""

    def to_peer(self, sender: Incarnation, to: Incarnation, message: PeerMessage) -> None:
        """Send on a peer stream."""

    def kv_events(self, sender: Incarnation, first: int, events: tuple[KVEvent, ...]) -> None:
        """Send on the stream of cache events."""

    def read_ms(self, owner: Incarnation, reader: Incarnation, num_bytes: int) -> float:
        """Until a READ that is posted now has ended."""


class SimulatedWorker:
    """One worker, as busy as its core makes it; an idle one costs nothing.

    Attributes:
        info: its registration, repeated at every heartbeat.
        core: the production core; to be looked at only.
        num_steps: that its engine has computed.
        busy_ms: of its engine.
    """

    def __init__(self, world: Surroundings, me: Incarnation, role: str, host: Host) -> None:
        plan = world.plan
        self._host = host
        host.num_workers += 1
        self._world, self._time, self._me = world, world.time, me
        self._curves = plan.curves
        self._pace = StepPace(plan.limits.max_step_tokens)
        self._launched: deque[tuple[Step, float]] = deque()
        """Steps in flight and what each one takes; the first one runs."""
        self._pump_due_ms: float | None = None
        self._kv_sequence = 0
        self._told = ToldStats()
        self._events_due = False
        """It is known when the next ones are sent."""
        self._reports = self._ticks = False
        self.num_steps = 0
        self.busy_ms = 0.0
        limits = plan.limits
        kv = KVCacheCoordinator(
            plan.curves.layout,
            plan.curves.num_blocks,
            max_model_tokens=limits.max_model_tokens,
            max_step_tokens=limits.steps_max * limits.max_step_tokens,
            steps_max=limits.steps_max,
            policy=plan.cache,
        )
        self._events: KVEventLog = kv.events
        self.core = WorkerCore(me, plan.curves.layout, kv, world.hasher, limits, world.retry_ms)
        self.info = _registration(self.core, me, role, world.hasher.scheme)

    # --- events

    def on_router_message(self, message: ToWorkerMessage) -> None:
        """A submit or cancel arrived."""
        if isinstance(message, Submit):
            self._told.tell_again()
            self._world.to_router(self._me, receipt_of(message))
        self._handle(self.core.on_router_message(self._time.clock_ms, message))

    def on_peer_message(self, sender: Incarnation, message: PeerMessage) -> None:
        """Another worker's message arrived."""
        self._handle(self.core.on_peer_message(self._time.clock_ms, sender, message))

    def report(self) -> bool:
        """Send stats if the router has to have them; whether it knows how things are now."""
        stats = worker_stats(self.core, {}, self._pace.prefill_speed, self._pace.step_times)
        pace_ms = self._world.report_pace_ms
        if self._told.is_due(self._time.now_ms, stats, loaded=self.is_busy, pace_ms=pace_ms):
            self._world.to_router(self._me, stats)
        return self._told.knows(stats)

    def check(self) -> None:
        """Verify the core's invariants: every block of the pool is looked at.

        Raises:
            InvariantViolation: one does not hold.
        """
        check_core(self.core)

    def check_rest(self) -> None:
        """Verify that nothing is held once nothing goes on.

        Raises:
            InvariantViolation: a count does not add up.
        """
        kv = self.core.kv
        if not self.is_busy and kv.num_available_blocks != kv.num_usable_blocks:
            raise InvariantViolation(
                f"{self._me}: {kv.num_available_blocks} of {kv.num_usable_blocks} blocks available"
            )

    @property
    def is_busy(self) -> bool:
        """Something goes on here, or is lent."""
        return bool(self.core.sequences or self.core.leases.num_live or self._launched)

    @property
    def launched_ms(self) -> float:
        """What the steps take that have not ended."""
        return sum(took_ms for _, took_ms in self._launched)

    @property
    def reads(self) -> bool:
        """READs of it have not ended: perhaps of requests that have."""
        return bool(self.core.inbound.statuses())

    # --- carrying out

    def _handle(self, actions: Iterable[WorkerAction]) -> None:
        self._perform(actions)
        self._pump()
        num_events = self._events.next_seq - self._kv_sequence
        if num_events and (not self._events_due or num_events >= WAITING_EVENTS_MAX):
            self._send_events()
        if self.is_busy:
            self._keep_awake()

    def _perform(self, actions: Iterable[WorkerAction]) -> None:
        for action in actions:
            match action:
                case ToRouter(message):
                    self._world.to_router(self._me, message)
                case Send(to, peer_message):
                    self._world.to_peer(self._me, to, peer_message)
                case PostRead():
                    self._read(action)
                case Exit(reason):
                    raise links_too_slow(self._me, reason)
                case _:
                    pass  # streams to peers are always there; transports do not fail

    def _pump(self) -> None:
        """Launch every step that may be launched now, and come back when the next one is due."""
        now_ms = self._time.now_ms
        while True:
            if wait_ms := self._pace.wait_ms(now_ms):
                due_ms = now_ms + wait_ms
                if self._pump_due_ms is None or due_ms < self._pump_due_ms:
                    self._pump_due_ms = due_ms
                    self._time.after(wait_ms, self._pump_due)
                return
            step, actions = self.core.next_step(self._time.clock_ms)
            self._perform(actions)
            if step is None:
                return
            self._pace.launched(now_ms, step)
            shape = shape_of(step.slices)
            took_ms = self._curves.step_ms(shape)
            if others := self._host.others_share(computes=bool(self._launched)):
                num_tokens = shape.num_prefill_tokens + shape.num_decodes
                took_ms *= 1 + others * self._curves.beside.at(num_tokens)
            self._launched.append((step, took_ms))
            if len(self._launched) == 1:
                self._host.num_computing += 1
                self._time.after(took_ms, self._step_done)

    def _pump_due(self) -> None:
        self._pump_due_ms = None
        self._handle(())

    def _step_done(self) -> None:
        step, took_ms = self._launched.popleft()
        self._pace.done(self._time.now_ms)
        self.num_steps += 1
        self.busy_ms += took_ms
        if self._launched:
            self._time.after(self._launched[0][1], self._step_done)
        else:
            self._host.num_computing -= 1
        result = StepResult(step.step_id, self._samples(step))
        self._handle(self.core.on_step_done(self._time.clock_ms, result))

    def _samples(self, step: Step) -> tuple[SampledToken | None, ...]:
        """A token for each sequence that is to have one: always the same one of its request."""
        number_of = self._world.number_of
        return tuple(
            [
                None
                if part.sampling is None
                else SampledToken(ANSWER_TOKEN + number_of(part.key.request_id))
                for part in step.slices
            ]
        )

    def _read(self, read: PostRead) -> None:
        num_bytes = len(read.src_blocks) * self._curves.layout.block_bytes
        took_ms = self._world.read_ms(read.owner, self._me, num_bytes)
        took_ms += self._curves.read_more_ms
        self._time.after(took_ms, lambda: self._read_done(read.read_id))

    def _read_done(self, read_id: int) -> None:
        self._handle(self.core.on_read_done(self._time.clock_ms, read_id, ""))

    def _send_events(self) -> None:
        batch = self._events.since(self._kv_sequence)
        assert batch is not None, "few wait"
        self._kv_sequence = batch.next_seq
        self._world.kv_events(self._me, batch.first_seq, batch.events)
        pace_ms = self._world.report_pace_ms
        if pace_ms and not self._events_due:
            self._events_due = True
            self._time.after(pace_ms, self._send_waiting_events)

    def _send_waiting_events(self) -> None:
        self._events_due = False
        if self._events.next_seq != self._kv_sequence:
            self._send_events()

    # --- as long as something goes on

    def _keep_awake(self) -> None:
        if not self._reports:
            self._reports = True
            self._time.after(STATS_MS, self._report_again)
        if not self._ticks:
            self._ticks = True
            self._time.after(self._tick_ms, self._tick)

    @property
    def _tick_ms(self) -> float:
        return TICK_MS if self.core.prefill_side.backing_off else SLOW_TICK_MS

    def _report_again(self) -> None:
        knows = self.report()
        self._reports = self.is_busy or not knows
        if self._reports:
            self._time.after(STATS_MS, self._report_again)

    def _tick(self) -> None:
        self._ticks = False
        self._handle(self.core.tick(self._time.clock_ms))


def links_too_slow(worker: Incarnation, reason: str) -> ExpiredError:
    """What a real fleet loses a worker by; in this one nothing fails."""
    return ExpiredError(
        f"{worker.worker_id} would end: {reason}; the links are too slow for this load "
        "(transfer.read_stuck_ms)"
    )


def _registration(core: WorkerCore, me: Incarnation, role: str, hash_scheme: str) -> WorkerInfo:
    layout = core.kv.layout
    contract = Contract(
        model_fingerprint="simulated",
        dtype="",
        groups=tuple(f"{group.spec} layers={group.layers}" for group in layout.groups),
        page_format="simulated",
        block_bytes=layout.block_bytes,
        hash_block_tokens=layout.hash_block_tokens,
        hash_scheme=hash_scheme,
        wire_min=WIRE_MIN,
        wire_max=WIRE_MAX,
        layout_version=LAYOUT_VERSION,
    )
    return WorkerInfo(
        incarnation=me,
        address="",
        role=role,
        model="simulated",
        contract=contract,
        groups=group_infos(layout),
        max_model_tokens=served_tokens_max(core.limits, core.kv),
        handover_tokens_max=handover_tokens_max(core.limits, core.kv),
        num_blocks=core.kv.num_usable_blocks,
        max_sequences=core.limits.max_sequences,
    )
