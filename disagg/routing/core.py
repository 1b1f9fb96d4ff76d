"""The router without I/O: registrations, events, tokens and time in; actions out."""

from collections import Counter
from collections.abc import Mapping, Sequence

from disagg.errors import SupersededError, WorkerIdTakenError
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import KVEvent, SnapshotPart
from disagg.messages.outputs import StepOutputs
from disagg.messages.registration import WorkerInfo
from disagg.messages.reports import PrefillReport, TransferReport
from disagg.messages.router import WorkerMatch
from disagg.messages.session import (
    PartEnded,
    PrefillProgress,
    PrefixCacheReset,
    Superseded,
    ToRouterMessage,
    WorkerIdClaimed,
)
from disagg.messages.stats import WorkerStats
from disagg.messages.submit import PeerAddress
from disagg.routing.actions import (
    Connect,
    Disconnect,
    NewRequest,
    RefuseRegistration,
    RouterAction,
    ToWorker,
)
from disagg.routing.admission import Admission
from disagg.routing.cache_reset import CacheResets
from disagg.routing.end_pace import EndPace
from disagg.routing.fair_queue import FairQueue
from disagg.routing.fleet import Fleet
from disagg.routing.live_requests import LiveRequests
from disagg.routing.options import RoutingOptions
from disagg.routing.planner import Planner
from disagg.routing.policy.local import Local
from disagg.routing.policy.prefix_then_load import PrefixThenLoad
from disagg.routing.policy.registry import make_policy
from disagg.routing.record import RequestRecord
from disagg.routing.report_pace import ReportPace
from disagg.routing.request import RoutedRequest
from disagg.routing.request_lifecycle import RequestLifecycle
from disagg.routing.revisions import (
    Revision,
    Revisions,
    RevisionView,
    refuse_to_serve_nobody,
)
from disagg.routing.rooms import Rooms
from disagg.routing.worker_view import WorkerView

SENT_AGAIN = "its client sent it again: the later one is served in its place"


class RouterCore:
    """Decides who prefills and who decodes, assembles the token streams, plans anew on failures.

    The caller performs the returned actions in order. ``now_ms`` must not go backwards.
    Everything belongs to one thread.

    Args:
        options: of this life of the router.

    Raises:
        ConfigError: no policy has the name that they say.

    Attributes:
        counters: monotonic counts by (name, label); label "" where there is none.
    """

    def __init__(self, options: RoutingOptions) -> None:
        self.counters: Counter[tuple[str, str]] = Counter()
        router_id = options.router_id
        self._revisions = Revisions(
            options.hasher_of,
            options.revision_weights,
            accept_unlike=options.accept_unlike_workers,
        )
        rooms = Rooms(router_id, options.worker_prefill_tokens_max, options.worker_waiting_max)
        self._fleet = Fleet(
            options.worker_silent_ms, self._revisions, rooms, options.worker_silent_busy_ms
        )
        self._resets = CacheResets(self.counters, router_id)
        policies = {
            None: make_policy(options.policy, options.policy_options),
            True: PrefixThenLoad(options.policy_options),
            False: Local(options.policy_options),
        }
        planner = Planner(
            self._fleet,
            policies,
            self._resets,
            options.policy_options.slo_tpot_ms,
            options.on_plan_bug,
        )
        turns: FairQueue[RoutedRequest] = FairQueue(options.tenant_weights)
        pace = EndPace()
        self._live = LiveRequests(self._fleet, pace, self.counters, options.records_max)
        self._lifecycle = RequestLifecycle(
            self._fleet,
            planner,
            self._live,
            turns,
            pace,
            self.counters,
            replans_max=options.replans_max,
            request_timeout_ms=options.request_timeout_ms,
            worker_stalled_ms=options.worker_stalled_ms,
        )
        self._admission = Admission(
            self._fleet,
            planner,
            self._live,
            self._lifecycle,
            turns,
            pace,
            self.counters,
            requests_max=options.requests_max,
            request_timeout_ms=options.request_timeout_ms,
            router_id=router_id,
        )

    @property
    def fleet(self) -> tuple[WorkerView, ...]:
        """All workers known now, by id."""
        return tuple(self._fleet.views(self._live.num_by_worker()))

    @property
    def report_pace(self) -> ReportPace:
        """How often each worker should report; to be said in answer to its registration."""
        return self._fleet.report_pace

    @property
    def full_roles(self) -> frozenset[str]:
        """Roles that have ready workers, none of which has room for one more request."""
        return self._fleet.full_roles

    @property
    def serving(self) -> tuple[Revision, ...]:
        """Revisions that take new requests, by name."""
        return tuple(self._revisions.serving(self._fleet.ready_revisions()))

    @property
    def ready(self) -> bool:
        """At least one worker can take requests."""
        return bool(self.serving)

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus output that every revision serving can end; 0 without one."""
        return min(map(self._fleet.max_model_tokens, self.serving), default=0)

    def max_model_tokens_of(self, revision: Revision) -> int:
        """Longest prompt plus output that some ready worker of it can end; 0 without one."""
        return self._fleet.max_model_tokens(revision)

    def default_model_tokens_of(self, revision: Revision) -> int:
        """Length to which a request grows that sets no bound itself; 0 without a ready worker."""
        return self._fleet.default_model_tokens(revision)

    def assign(self, request_id: str) -> Revision:
        """The revision for which a new request is to be prepared; equal ids get the same.

        Raises:
            RemoteFault: no worker that takes new requests is ready.
        """
        return self._revisions.assign(request_id, self._fleet.ready_revisions())

    @property
    def revision_weights(self) -> Mapping[str, float]:
        """By which new requests are shared among revisions."""
        return self._revisions.weights

    def set_revision_weights(self, weights: Mapping[str, float]) -> None:
        """Share new requests so from now on; those assigned already stay where they are.

        Raises:
            ConfigError: a weight cannot be used.
            RequestError: no revision that is ready would have any.
        """
        refuse_to_serve_nobody(weights, self._fleet.ready_revisions())
        self._revisions.weights = weights

    def revision_views(self) -> tuple[RevisionView, ...]:
        """All revisions that have a worker or a weight, by name."""
        running = Counter(one.decode.revision for one in self._live.generations())
        return self._fleet.revision_views(running, self._admission.num_waiting_by_revision())

    @property
    def num_live(self) -> int:
        """Requests that are neither finished nor failed, waiting ones included."""
        return len(self._live) + len(self._admission)

    @property
    def num_waiting(self) -> int:
        """Requests that wait here for room at the workers."""
        return len(self._admission)

    def retry_after_s(self, now_ms: int) -> int:
        """Seconds until a request that finds no room now may find some, at the recent pace."""
        return self._admission.retry_after_s(now_ms)

    def register(self, now_ms: int, info: WorkerInfo) -> list[RouterAction]:
        """A registration, repeated by the worker as its heartbeat.

        A new incarnation yields ``Connect``; a worker whose session was lost is connected anew by
        its next registration. One whose id another process has is refused
        (``RefuseRegistration``), and that one is told.

        Raises:
            ConfigError: another model or hash scheme than the fleet's, or an unknown kind of
                KV cache group.
        """
        try:
            new = self._fleet.register(now_ms, info)
        except WorkerIdTakenError as error:
            self.counters["registrations_refused", error.code] += 1
            actions: list[RouterAction] = [RefuseRegistration(error)]
            holder = self._fleet.claimed(now_ms, info)
            if holder is not None:
                claim = WorkerIdClaimed(PeerAddress(info.incarnation, info.address))
                actions.append(ToWorker(holder, claim))
            return actions
        return [Connect(info)] if new else []

    def session_up(self, now_ms: int, incarnation: Incarnation) -> list[RouterAction]:
        """The session stream is open; the worker takes requests once its stats are ready."""
        self._fleet.connected(now_ms, incarnation)
        return self._resets.session_up(incarnation)

    def session_lost(self, now_ms: int, incarnation: Incarnation) -> list[RouterAction]:
        """The session ended or could not be opened: the worker is lost until it registers."""
        return self._drop(now_ms, incarnation, "session_ended")

    def kv_sequence(self, incarnation: Incarnation) -> int:
        """Number of the next event wanted: ``from_sequence`` of a new event stream."""
        return self._fleet.kv_sequence(incarnation)

    def kv_events(
        self,
        incarnation: Incarnation,
        epoch: str,
        first_sequence: int,
        snapshot: SnapshotPart | None,
        events: Sequence[KVEvent],
    ) -> bool:
        """Events from a worker's cache. False: a gap; reopen the stream at ``kv_sequence``."""
        if epoch != incarnation.epoch:
            return False
        complete = self._fleet.kv_events(incarnation, first_sequence, snapshot, events)
        if not complete:
            self.counters["kv_event_gaps", ""] += 1
        return complete

    def from_worker(
        self, now_ms: int, incarnation: Incarnation, message: ToRouterMessage
    ) -> list[RouterAction]:
        """Handle a worker's message; unknown incarnations and old generations change nothing."""
        if not self._fleet.note_alive(now_ms, incarnation):
            return []
        match message:
            case WorkerStats():
                self._fleet.update(now_ms, incarnation, message)
                actions = self._lifecycle.stalled(now_ms, incarnation) if message.stalled else []
                return actions + self._admission.admit(now_ms)  # it may be ready only now
            case StepOutputs():
                actions = []
                for scored in message.prompt_logprobs:
                    actions += self._lifecycle.scored(now_ms, incarnation, scored)
                for output in message.outputs:
                    actions += self._lifecycle.output(now_ms, incarnation, output)
                return actions + self._admit_freed(now_ms)
            case PartEnded():
                actions = self._lifecycle.part_ended(now_ms, incarnation, message)
                return actions + self._admit_freed(now_ms)
            case PrefillProgress():
                actions = self._lifecycle.progress(now_ms, incarnation, message)
                return actions + self._admit_freed(now_ms)
            case PrefillReport() | TransferReport():
                self._lifecycle.report(now_ms, incarnation, message)
                return []
            case PrefixCacheReset():
                return self._resets.answered(now_ms, incarnation, message, self._fleet.views())
            case Superseded(key):
                error = SupersededError(SENT_AGAIN)
                actions = self._lifecycle.superseded(now_ms, incarnation, key, error)
                return actions + self._admit_freed(now_ms)

    def generate(self, now_ms: int, request: NewRequest) -> list[RouterAction]:
        """Plan and submit a request, at once or when it has its turn.

        Raises:
            CapacityError: ``requests_max`` are live, and no other tenant has more that wait.
            ContextLengthError: longer at its end than any ready worker holds.
            RequestError: the request id is live already, or there is nothing to compute.
            RemoteFault: no worker is ready.
        """
        actions = self._admission.enter(now_ms, request)
        return actions + self._admission.admit(now_ms)

    def cancel(self, now_ms: int, request_id: str, reason: str) -> list[RouterAction]:
        """The client went away: nothing more is delivered; unknown ids are ignored."""
        actions = self._admission.cancel(now_ms, request_id, reason)
        actions += self._lifecycle.cancel(now_ms, request_id, reason)
        return actions + self._admit_freed(now_ms)

    def free_places(self, group: int) -> None:
        """Keep no places for a group of which nothing more comes; unknown ones are ignored."""
        self._admission.free_places(group)

    def replace(self, now_ms: int, request_id: str) -> list[RouterAction]:
        """Fail a live request because its client sent it again; unknown ids are ignored."""
        error = SupersededError(SENT_AGAIN)
        actions = self._admission.fail(now_ms, request_id, error)
        actions += self._lifecycle.fail(now_ms, request_id, error)
        return actions + self._admit_freed(now_ms)

    def reset_prefix_caches(self, now_ms: int) -> list[RouterAction]:
        """Let every worker forget its prefix cache; ``CacheResetEnded`` follows, in 10 s at most.

        No request that is submitted after this call finds what was computed before it.

        Raises:
            CapacityError: a reset is under way.
            RemoteFault: no worker is connected.
        """
        return self._resets.begin(now_ms, self._fleet.views())

    def match(
        self, revision: Revision, num_tokens: int, hashes: Sequence[bytes]
    ) -> tuple[WorkerMatch, ...]:
        """See `Fleet.matches`."""
        return self._fleet.matches(revision, num_tokens, hashes)

    def tick(self, now_ms: int) -> list[RouterAction]:
        """Drop silent workers and expire requests; call it several times a second.

        Time without a tick counts as half a second of silence at most: the router itself stood.
        """
        actions: list[RouterAction] = []
        for incarnation in self._fleet.silent(now_ms, self._awaited):
            actions += self._drop(now_ms, incarnation, "silent")
        actions += self._resets.expire(now_ms) + self._lifecycle.expire(now_ms)
        return actions + self._admission.expire(now_ms) + self._admission.admit(now_ms)

    def record(self, request_id: str) -> RequestRecord | None:
        """Record of a live or recently finished request; None if it is unknown."""
        waiting = self._admission.find(request_id)
        return waiting.record() if waiting is not None else self._live.record(request_id)

    def _drop(self, now_ms: int, incarnation: Incarnation, cause: str) -> list[RouterAction]:
        if incarnation not in self._fleet:
            return []
        lost = self._fleet.remove(incarnation)
        actions: list[RouterAction] = [Disconnect(incarnation, silent=cause == "silent")]
        actions += self._resets.lost(incarnation, cause)
        actions += self._lifecycle.lost(now_ms, lost, cause)
        return actions + self._admit_freed(now_ms)

    def _awaited(self) -> set[Incarnation]:
        return {worker for one in self._live.generations() for worker in one.awaited()}

    def _admit_freed(self, now_ms: int) -> list[RouterAction]:
        """Start what waits, if a request has ended or a prompt was computed since the last look."""
        freed, self._live.has_freed = self._live.has_freed, False
        return self._admission.admit(now_ms) if freed else []
