"""Performs the actions of the router's core, on one event loop."""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from disagg.errors import DuplicateRequestError, StoppingError
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import KVEventBatch, KVSnapshot
from disagg.messages.registration import WorkerInfo
from disagg.messages.reports import TransferReport
from disagg.messages.session import ToRouterMessage
from disagg.messages.stats import WorkerStats
from disagg.messages.submit import Submit
from disagg.router.client_requests import ClientRequests
from disagg.router.client_stream import STOP_STRING, ClientStream, Unread
from disagg.router.metrics import Metrics
from disagg.router.new_core import new_core
from disagg.router.observed_call import CANCELLED, STOP, ObservedCall, ObservedChoice, Observers
from disagg.router.open_answers import OpenAnswers
from disagg.router.options import RouterOptions
from disagg.router.plan_bugs import PlanBugs
from disagg.router.registrations import Refusals, warn_of_strangers
from disagg.router.request_spans import RequestSpans
from disagg.router.revision_metrics import RevisionCollector
from disagg.router.router_id import new_router_id
from disagg.router.ticker import tick_forever
from disagg.router.wanted_roles import WantedRoles
from disagg.router.worker_session import SessionEvents
from disagg.router.worker_sessions import WorkerSessions
from disagg.routing.actions import (
    CacheResetEnded,
    Connect,
    Deliver,
    Disconnect,
    Fail,
    NewRequest,
    RefuseRegistration,
    RouterAction,
    ToWorker,
)
from disagg.tls.connections import Connections

logger = logging.getLogger(__name__)

SESSION_ENDED = "session to worker %s ended: %s"
SILENT = (
    "worker %s (epoch %s) is taken for lost: nothing has come from it for too long"
    " (router.worker_silent_busy_ms, router.worker_silent_ms); it or its host stands still, or the"
    " network loses what it sends"
)

CLOCKS_APART_MS = 1_000
"""So far routers' clocks may differ, see `Claim`."""


class Dispatcher:
    """One request from start to end, for all requests and workers. Used from one event loop.

    Attributes:
        core: the decisions; read freely, change only through this class.
        observers: who is told of calls and requests.
        draining: no new requests; those that run go on.
        stopping: no requests at all.
        open_answers: what a drain waits for.
        recent_ids: of requests by when they came; one that was sent again stands there twice.
        new_group: a new number for the requests of one client's request.
        unread: a new account of what waits for a client.
        sessions: with all workers, those that are being dialled among them.
        roles: of which workers should be there before requests come.
        broken: set when nothing here can be relied on any more; the process should end.
    """

    def __init__(
        self,
        options: RouterOptions,
        metrics: Metrics,
        connections: Connections,
        spans: RequestSpans,
    ) -> None:
        self.router_id = new_router_id(options.name)
        self.broken = asyncio.Event()
        self._plan_bugs = PlanBugs(metrics, self.broken.set)
        self.core = new_core(options, self.router_id, self._plan_bugs.failed)
        metrics.show_core(self.core.counters, lambda: self.core.num_waiting)
        self.observers = Observers(metrics, spans, log_requests=options.log_requests)
        metrics.registry.register(RevisionCollector(self.core.revision_views))
        self.draining = self.stopping = False
        self.roles = WantedRoles(self.core, options.roles_wanted)
        self._metrics = metrics
        self._wall_offset_ms = self._wall_offset_seen_ms = _wall_offset_ms()
        self._live = ClientRequests(self.core.record, options.prompt_logprobs_max)
        self.new_group = itertools.count(1).__next__
        self.unread = partial(Unread, options.unread_tokens_max)
        self.open_answers = OpenAnswers()
        self.recent_ids: deque[str] = deque(maxlen=options.records_max)
        # Room for a submit and a cancel of every request at every re-plan.
        outgoing_max = 2 * options.requests_max * (1 + options.replans_max)
        self.sessions = WorkerSessions(self.router_id, outgoing_max, connections)
        self._refusals = Refusals(SESSION_ENDED)
        self._reset: asyncio.Future[CacheResetEnded] | None = None
        self._ticker = asyncio.create_task(
            tick_forever(self._tick, self._metrics, self.broken.set), name="router tick"
        )

    @property
    def ready(self) -> bool:
        """Requests should come here: some worker serves, and every role wanted has been there."""
        return self.core.ready and not self.draining and self.roles.were_complete

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch as of the start, never going backwards."""
        return int(time.monotonic() * 1000) + self._wall_offset_ms

    def register(self, info: WorkerInfo) -> None:
        """Take in a worker's registration or heartbeat.

        Raises:
            WorkerIdTakenError: another process lives under its id.
            ConfigError: it does not fit its revision.
        """
        if self.stopping:
            return
        actions = self.core.register(self.now_ms(), info)
        if (session := self.sessions.get(info.incarnation)) is not None:
            session.info = info  # with the role it has now
        is_known = self._refusals.knows(info.incarnation.worker_id, info.incarnation.epoch)
        if not is_known and any(isinstance(action, Connect) for action in actions):
            warn_of_strangers(info, self.core.fleet)
        self._do(actions)
        for action in actions:
            if isinstance(action, RefuseRegistration):
                raise action.error

    def check_accepts(self) -> None:
        """Raise StoppingError if no new request is accepted any more."""
        if self.draining:
            raise StoppingError

    def free_places(self, group: int) -> None:
        """Nothing more of this group will come."""
        self.core.free_places(group)

    def generate(
        self,
        request: NewRequest,
        call: ObservedCall,
        unread: Unread | None = None,
        *,
        shares_prompt: bool = False,
    ) -> ClientStream:
        """Start a choice of a call; a live one that its client has sent again ends in its favour.

        What was accepted before a drain may still start: choices follow their prompt's first one.
        Streams of one answer share ``unread``.

        Args:
            request: the choice, as the core takes it.
            call: it belongs to.
            unread: what its client has not read; None: an account of its own.
            shares_prompt: another choice has its prompt, and counts it.

        Raises:
            DisaggError: it cannot be served; nothing was sent to a worker.
        """
        if self.stopping:
            raise StoppingError
        if (live := self._live.get(request.request_id)) is not None:
            if live.stream.request.claim != request.claim:
                raise DuplicateRequestError(
                    "a live request has this id", param="request_id", request_id=request.request_id
                )
            self._do(self.core.replace(self.now_ms(), request.request_id))
        self._live.check_prompt_logprobs(request)
        actions = self.core.generate(self.now_ms(), request)
        unread = unread or self.unread()
        stream = ClientStream(request, self.cancel, unread, self.open_answers.close)
        self.open_answers.add(stream)
        observed = ObservedChoice(self.now_ms(), call, request, shares_prompt=shares_prompt)
        self._live.add(stream, observed)
        self.recent_ids.append(request.request_id)
        self._do(actions)
        return stream

    def cancel(self, request_id: str, reason: str) -> None:
        """End a request at all workers; unknown ids are ignored."""
        self._end(request_id, reason, STOP if reason == STOP_STRING else CANCELLED)

    def _end(self, request_id: str, reason: str, outcome: str) -> None:
        live = self._live.pop(request_id)
        if live is None:
            return
        actions = self.core.cancel(self.now_ms(), request_id, reason)
        live.observed.ended(outcome, self._live.record(request_id))
        self._do(actions)

    async def reset_prefix_caches(self) -> CacheResetEnded:
        """Let every worker forget its prefix cache; returns what each made of it.

        The core bounds the wait. Who cancels this changes nothing at the workers.

        Raises:
            CapacityError: a reset is under way.
            RemoteFault: no worker is connected, or the router is about to end.
        """
        self.check_accepts()
        actions = self.core.reset_prefix_caches(self.now_ms())
        ended: asyncio.Future[CacheResetEnded] = asyncio.get_running_loop().create_future()
        self._reset = ended
        self._do(actions)
        return await ended

    def _reset_ended(self, ended: CacheResetEnded) -> None:
        log = logger.info if ended.complete else logger.warning
        log("reset %d of the prefix caches: %s", ended.number, ended.workers)
        if self._reset is not None and not self._reset.done():
            self._reset.set_result(ended)

    def set_revision_weights(self, weights: Mapping[str, float]) -> None:
        """Share new requests among revisions so from now on.

        Raises:
            ConfigError: a weight cannot be used.
            RequestError: no revision that is ready would have any.
        """
        self.core.set_revision_weights(weights)
        logger.info("weights of revisions: %s", dict(weights) or "all equal")

    def drain(self) -> None:
        """Accept no new request; those that run go on, on other workers if need be."""
        self.draining = True

    async def stop(self) -> None:
        """Cancel what lives, inform the workers, close all streams."""
        self.draining = self.stopping = True
        for live in self._live:
            request_id = live.stream.request_id
            self._end(request_id, "router stops", StoppingError.code)
            live.stream.fail(StoppingError(request_id=request_id))
        if self._reset is not None and not self._reset.done():
            self._reset.set_exception(StoppingError())
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        await self.sessions.stop()

    # --- what the core wishes

    def _do(self, actions: Sequence[RouterAction]) -> None:
        for action in actions:
            match action:
                case Deliver():
                    self._live.deliver(action)
                case ToWorker(worker, message):
                    if isinstance(message, Submit):
                        self._plan_bugs.planned()
                    if (session := self.sessions.get(worker)) is not None:
                        session.send(self._live.traced(message))
                case Fail(request_id, error):
                    self._live.fail(request_id, error)
                case Connect(info):
                    self._connect(info)
                case Disconnect(worker, silent):
                    self._disconnect(worker, silent=silent)
                case CacheResetEnded():
                    self._reset_ended(action)
                case RefuseRegistration():
                    pass  # told to whoever registers

    def _connect(self, info: WorkerInfo) -> None:
        worker = info.incarnation
        events = SessionEvents(
            up=partial(self._up, info),
            message=partial(self._message, worker),
            lost=partial(self._lost, worker),
            kv_sequence=partial(self.core.kv_sequence, worker),
            kv_batch=partial(self._kv_batch, worker),
            failed=self._metrics.task_failed,
            broken=self.broken.set,
        )
        self.sessions.open(info, events)

    def _disconnect(self, worker: Incarnation, *, silent: bool) -> None:
        if self.sessions.get(worker) is None:
            return
        if silent:
            logger.warning(SILENT, worker.worker_id, worker.epoch)
        elif not self._refusals.knows(worker.worker_id, worker.epoch):
            logger.info("worker %s (epoch %s) left", worker.worker_id, worker.epoch)
        self._metrics.worker_left(worker.worker_id)
        self.roles.worker_left()
        self.sessions.close(worker)

    # --- events of the sessions

    def _up(self, info: WorkerInfo) -> None:
        if not self._refusals.knows(info.incarnation.worker_id, info.incarnation.epoch):
            _log_joined(info)
        self._do(self.core.session_up(self.now_ms(), info.incarnation))

    def _message(self, worker: Incarnation, message: ToRouterMessage) -> None:
        if self._refusals.knows(worker.worker_id, worker.epoch):
            self._refusals.taken_in(worker.worker_id, worker.epoch)
            if (session := self.sessions.get(worker)) is not None:
                _log_joined(session.info)
        if isinstance(message, WorkerStats) and (session := self.sessions.get(worker)):
            self._metrics.worker_stats(worker.worker_id, session.info.role, message)
        elif isinstance(message, TransferReport):
            self._metrics.transfer(message)
        self._do(self.core.from_worker(self.now_ms(), worker, message))
        if isinstance(message, WorkerStats):
            self.roles.worker_heard()

    def _lost(self, worker: Incarnation, reason: str) -> None:
        session = self.sessions.get(worker)
        if session is not None and not session.heard:  # and so it will be with each heartbeat
            self._refusals.refused(worker.worker_id, worker.epoch, reason)
        else:
            logger.warning(SESSION_ENDED, worker.worker_id, reason)
        self._do(self.core.session_lost(self.now_ms(), worker))

    def _kv_batch(self, worker: Incarnation, epoch: str, batch: KVEventBatch | KVSnapshot) -> bool:
        if isinstance(batch, KVEventBatch):
            return self.core.kv_events(worker, epoch, batch.first_seq, None, batch.events)
        session = self.sessions.get(worker)
        events = session.events_of(batch) if session is not None else []
        return self.core.kv_events(worker, epoch, batch.next_seq, batch.part, events)

    def _tick(self) -> None:
        self._do(self.core.tick(self.now_ms()))
        self._see_wall_clock()

    def _see_wall_clock(self) -> None:
        """Say when it was set: every bound on waiting goes on, and nothing else shows it."""
        offset_ms = _wall_offset_ms()
        if abs(offset_ms - self._wall_offset_seen_ms) >= CLOCKS_APART_MS:
            self._wall_offset_seen_ms = offset_ms
            logger.warning(
                "this machine's clock was set, or has slept: it is %+.1f s from the one of this"
                " router's start, which records go by and requests that are sent twice; the"
                " router's next start takes the new one",
                (offset_ms - self._wall_offset_ms) / 1000,
            )


def _wall_offset_ms() -> int:
    return int((time.time() - time.monotonic()) * 1000)


def _log_joined(info: WorkerInfo) -> None:
    worker = info.incarnation
    logger.info(
        "worker %s (epoch %s, %s, revision %s, %s) joined",
        *(worker.worker_id, worker.epoch, info.role, info.revision, info.address),
    )
