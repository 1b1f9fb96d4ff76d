"""The control thread: feeds events to the worker's core and carries out its actions.

Everything here runs on one asyncio loop. Forward passes run on the engine's threads, NIXL posts on
the transport's; both report back through the loop, so a commit or an expiry never waits for a
step.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from disagg.messages.identity import Incarnation
from disagg.messages.peer import PeerMessage
from disagg.messages.session import (
    CallOffDrain,
    Cancel,
    Claim,
    Drain,
    ToWorkerMessage,
    WorkerIdClaimed,
    receipt_of,
)
from disagg.messages.submit import Submit
from disagg.scheduling.actions import TierKey, WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.stats import check_core, worker_stats
from disagg.scheduling.step import Step, StepResult
from disagg.scheduling.step_pace import StepPace
from disagg.transfer.read_plan import ReadPlan
from disagg.workers.checksums import ComputesChecksums
from disagg.workers.engine_threads import EngineThreads
from disagg.workers.engines.protocol import EngineFailedError, RunsSteps
from disagg.workers.own_transport import OwnTransport
from disagg.workers.performer import PeerLinks, Performer
from disagg.workers.request_trace import RequestTrace
from disagg.workers.router_sessions import End, RouterSessions
from disagg.workers.router_sessions import Send as SendToRouter
from disagg.workers.tiers.protocol import CopiesBlocks
from disagg.workers.transport import KVTransport
from disagg.workers.worker_clock import WorkerClock

log = logging.getLogger(__name__)

TICK_S = 0.01
"""Reserve retries are a few milliseconds; everything else due is far coarser."""
STATS_S = 0.1
"""Changed stats are sent at most so often."""
ROUTERS_MAX = 16
"""Sessions at a time, unless it is said otherwise."""
STEP_SLOW_MS, STEP_STUCK_MS = 10_000, 300_000
"""When routers hear of a step that takes long, and how long it may; unless it is said otherwise."""
IDLE_CHECK_S = 1.0
"""Idle for so long, the core checks itself, once: it takes time linear in the pool."""


def _no_stream(reason: str) -> None:
    """End a session that has no stream."""


def _precise_ms() -> float:
    """This machine's monotonic clock: steps on a GPU take a few milliseconds."""
    return time.monotonic_ns() / 1e6


class Control:
    """Owns the core. All methods are to be called on the loop it was started on.

    Attributes:
        core: the decisions; read-only for others.
        report_pace_ms: so long after stats or KV events come the next ones at the earliest.
        changed: set, and replaced by a new one, after every event (KV event streams wait on it).
    """

    def __init__(
        self,
        core: WorkerCore,
        engine: RunsSteps,
        transport: KVTransport,
        on_failed: Callable[[str], None],
        trace: RequestTrace,
        tiers: CopiesBlocks | None = None,
        checksums: ComputesChecksums | None = None,
        *,
        on_drained: Callable[[], None] = lambda: None,
        report_pace_ms: Callable[[], int] = lambda: 0,
        routers_max: int = ROUTERS_MAX,
        step_stuck_ms: int = STEP_STUCK_MS,
        step_slow_ms: int = STEP_SLOW_MS,
    ) -> None:
        self.core = core
        self._tiers = tiers
        self._checksums = checksums
        self.changed = asyncio.Event()
        self._now_ms = WorkerClock().now_ms
        self._engine = EngineThreads(engine)
        self._transport = OwnTransport(transport)
        self._on_failed = on_failed
        self.report_pace_ms = report_pace_ms
        self._trace = trace
        self._pace = StepPace(core.limits.max_step_tokens)
        self._pump_timer: asyncio.TimerHandle | None = None
        self._step_slow_ms, self._step_stuck_ms = step_slow_ms, step_stuck_ms
        self._step_began_ms = 0
        self._sessions = RouterSessions(routers_max)
        self._performer = Performer(
            self._sessions, self._transport, trace, tiers, checksums, self._fail, on_drained
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._check_due_s: float | None = None
        self._ended = False

    def start(self, links: PeerLinks) -> None:
        """Begin to tick and to report."""
        self._performer.links = links
        self._tasks = [
            asyncio.create_task(self._tick_forever()),
            asyncio.create_task(self._report_forever()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def stop(self) -> None:
        """Stop ticking; the step that runs is waited for, and nothing follows it.

        One that does not end fails the worker: the end of its process alone ends it.
        """
        self._ended = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        closing = asyncio.create_task(asyncio.to_thread(self._engine.close))
        await asyncio.wait([closing], timeout=self._step_stuck_ms / 1000)
        if not closing.done():
            self._on_failed(
                "a step has not ended while the worker stops (scheduling.step_stuck_ms)"
            )
        await closing

    # --- events

    def open_session(self, send: SendToRouter, end: End = _no_stream, router: str = "") -> None:
        """Open a router's session; an earlier one of it ends at once, with all its generations.

        Args:
            send: takes messages for the router.
            end: takes the reason when a later session of this router replaces this one.
            router: id of the router's life; others keep theirs.

        Raises:
            CapacityError: so many others have sessions already.
        """
        self._sessions.check_room(router)
        if (replaced := self._sessions.take(router)) is not None:
            log.warning("a new session with router %s replaces the one before", router)
            self._router_lost(router)
            replaced("another session with this worker was opened")
        self._sessions.open(router, send, end)
        self._guard(self._report)

    def close_session(self, send: SendToRouter, router: str = "") -> None:
        """The session ended: nobody reads the answers any more."""
        if self._sessions.is_open(router, send):
            self._sessions.take(router)
            self._router_lost(router)

    @property
    def num_sessions(self) -> int:
        """Routers that are connected now; may be read on any thread."""
        return len(self._sessions)

    def in_session(self, send: SendToRouter, router: str = "") -> bool:
        """Whether this session is its router's current one; no later one has taken its place."""
        return self._sessions.is_open(router, send)

    def router_message(self, message: ToWorkerMessage) -> None:
        """Handle what a router wants."""
        if isinstance(message, Submit | Cancel | Claim):
            self._sessions.report_again(message.key.router)
        if isinstance(message, Submit):
            self._sessions.send(receipt_of(message))
            self._trace.submitted(message)
        self._guard(lambda: self.core.on_router_message(self._now_ms(), message))
        if isinstance(message, WorkerIdClaimed):
            log.warning(
                "another process claims this worker's id: epoch %s at %s; the router refuses it",
                message.claimant.incarnation.epoch,
                message.claimant.address,
            )
        if isinstance(message, Drain | CallOffDrain):
            log.info("an operator's word from a router: %s", message)
        if isinstance(message, Cancel):
            self._trace.cancelled(message.key, message.reason)

    def peer_known(self, peer: Incarnation, plan: ReadPlan | None) -> None:
        """A peer's hello arrived; ``plan``: how its blocks are read, None: whole."""
        self.core.on_peer_known(peer, plan)

    def peer_message(self, sender: Incarnation, message: PeerMessage) -> None:
        """Handle another worker's message."""
        self._guard(lambda: self.core.on_peer_message(self._now_ms(), sender, message))
        self._trace.received(sender, message)

    def peer_lost(self, peer: Incarnation) -> None:
        """A stream to or from the peer ended."""
        self._transport.remove_peer(peer)
        self._guard(lambda: self.core.on_peer_lost(self._now_ms(), peer))

    def read_done(self, read_id: int, error: str) -> None:
        """Every handle of a READ is terminal."""
        self._guard(lambda: self.core.on_read_done(self._now_ms(), read_id, error))

    def checksums_known(self, request_id: int, checksums: Sequence[int]) -> None:
        """Checksums of blocks of the own pool are there."""
        self._guard(lambda: self.core.on_checksums(self._now_ms(), request_id, checksums))

    def tier_written(
        self, copy_id: int, stored: Collection[TierKey], evicted: Collection[TierKey], error: str
    ) -> None:
        """A copy into a tier has ended; whose error it was the tier has said."""
        self._guard(lambda: self.core.on_tier_written(self._now_ms(), copy_id, stored, evicted))

    def tier_read(self, copy_id: int, intact: Collection[bool]) -> None:
        """A copy out of a tier has ended."""
        self._guard(lambda: self.core.on_tier_read(self._now_ms(), copy_id, intact))

    def tier_cleared(self, tier: str, error: str) -> None:
        """A tier was emptied, or could not be."""
        self._guard(lambda: self.core.on_tier_cleared(self._now_ms(), tier, error))

    def drain(self, timeout_ms: int) -> None:
        """Take no new work, tell all routers, and report when nothing goes on any more."""
        self.core.drain(self._now_ms(), timeout_ms)
        self._guard(self._report)

    def _router_lost(self, router: str) -> None:
        self._guard(lambda: self.core.on_router_lost(self._now_ms(), router))
        self._trace.forget_router(router, "router_lost")

    # --- carrying out

    def _guard(self, event: Callable[[], Iterable[WorkerAction]]) -> None:
        """Run one event of the core; a bug ends the worker rather than be served."""
        if self._ended:
            return
        try:
            self._performer.perform(event())
            self._transport.post_reads()
            self._pump()
        except Exception as error:
            log.exception("the worker's core failed")
            self._fail(f"{type(error).__name__}: {error}")
        if self.core.sequences:
            self._check_due_s = time.monotonic() + IDLE_CHECK_S
        self.changed.set()
        self.changed = asyncio.Event()

    def _pump(self) -> None:
        """Launch every step that may be launched; the engine runs them one by one."""
        while True:
            if wait_ms := self._pace.wait_ms(_precise_ms()):
                self._pump_later(wait_ms)
                return
            step, actions = self.core.next_step(self._now_ms())
            self._performer.perform(actions)
            if step is None:
                return
            self._pace.launched(_precise_ms(), step)
            if self.core.batcher.num_in_flight == 1:
                self._step_began_ms = self._now_ms()
            self._engine.launch(step).add_done_callback(partial(self._step_done, step))

    def _pump_later(self, wait_ms: float) -> None:
        """Let the next step be planned after a while, or when the running one has ended."""
        if self._pump_timer is not None:
            self._pump_timer.cancel()
        loop = asyncio.get_running_loop()
        self._pump_timer = loop.call_later(wait_ms / 1e3, self._guard, lambda: ())

    def _step_done(self, step: Step, done: "asyncio.Future[StepResult]") -> None:
        if done.cancelled():
            return
        self._pace.done(_precise_ms())
        self._step_began_ms = self._now_ms()  # the next one that waits begins
        error = done.exception()
        if isinstance(error, EngineFailedError):
            log.error("the engine failed in step %d", step.step_id, exc_info=error)
            self._fail(error.message)
            return
        result = done.result() if error is None else StepResult(step.step_id, error=repr(error))
        if result.error:
            log.error("step %d failed: %s", step.step_id, result.error)
        elif num_failed := sum(map(bool, result.errors)):
            of, why = len(result.errors), next(filter(None, result.errors))
            log.error("%d of %d slices of step %d failed: %s", num_failed, of, step.step_id, why)
        self._guard(lambda: self.core.on_step_done(self._now_ms(), result))

    def _fail(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._on_failed(reason)

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        """Fail the worker if a task of it fails: one that no longer ticks must not look healthy."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the control failed", exc_info=error)
            self._fail(f"{type(error).__name__}: {error}")

    def _report(self) -> list[WorkerAction]:
        tier_counts = self._tiers.counts() if self._tiers else {}
        sums = self._checksums.counts() if self._checksums else {}
        counts = {**self._pace.prefill_speed, **sums}
        stats = worker_stats(self.core, tier_counts, counts, self._pace.step_times)
        if self._step_ms > self._step_slow_ms:
            stats = replace(stats, stalled=True)
        loaded = bool(self.core.sequences or self.core.leases.num_live)
        self._sessions.report(self._now_ms(), stats, loaded=loaded, pace_ms=self.report_pace_ms())
        return []

    @property
    def _step_ms(self) -> int:
        """For how long the step that is computed has been; 0 without one."""
        return self._now_ms() - self._step_began_ms if self.core.batcher.num_in_flight else 0

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._guard(lambda: self.core.tick(self._now_ms()))
            self._transport.check()
            if self._transport.failure:
                # A worker that cannot transfer must not look healthy.
                self._fail(f"transport: {self._transport.failure}")
            if self._step_ms > self._step_stuck_ms:
                # It beats and takes requests as ever, of which none would end.
                self._fail(
                    f"a step has not ended for {self._step_ms} ms (scheduling.step_stuck_ms)"
                )
            if self._check_due_s is not None and time.monotonic() > self._check_due_s:
                self._check_due_s = None
                self._guard(self._check)

    def _check(self) -> list[WorkerAction]:
        check_core(self.core)
        return []

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(STATS_S)
            self._guard(self._report)
