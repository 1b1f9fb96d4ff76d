"""Requests that wait for room at the workers: who may come in, and who goes next."""

from collections import Counter
from dataclasses import dataclass

from disagg.errors import CapacityError, DisaggError, ExpiredError, RequestError, SloError
from disagg.routing.actions import Fail, NewRequest, RouterAction
from disagg.routing.end_pace import EndPace
from disagg.routing.fair_queue import FairQueue
from disagg.routing.fleet import Fleet
from disagg.routing.live_requests import LiveRequests
from disagg.routing.looks import Looks
from disagg.routing.planner import Planner
from disagg.routing.request import RoutedRequest
from disagg.routing.request_lifecycle import RequestLifecycle

HOLDS_MAX = 16
"""Requests that begin to wait by choice at one look."""
OTHERS_PART = 16
"""One in so many places is not for the tenant that has all others."""


@dataclass(slots=True)
class _Kept:
    """Places for requests of a group that are still to come."""

    tenant: str
    num: int


class Admission:
    """The one way from a client's request to a worker; see `RouterCore` for the arguments.

    A request goes to the workers at once while those that its plan names have room, else it waits
    here. Where requests wait, tenants are served by turns in tokens, and within a tenant the lowest
    priority goes first, of equal ones who came first. A policy may let a request wait by choice,
    see `Plan.hold_ms`: others go before it meanwhile. Only first plans wait: what has begun goes on
    elsewhere at once.

    Args:
        live: requests that have left the queue; keeps records of those that never do.
        lifecycle: begins what has its turn.
        turns: the queue; whoever delivers tokens charges it.
        pace: at which requests end.
    """

    def __init__(
        self,
        fleet: Fleet,
        planner: Planner,
        live: LiveRequests,
        lifecycle: RequestLifecycle,
        turns: FairQueue[RoutedRequest],
        pace: EndPace,
        counters: Counter[tuple[str, str]],
        *,
        requests_max: int,
        request_timeout_ms: int,
        router_id: str,
    ) -> None:
        self.counters = counters
        self._fleet = fleet
        self._planner = planner
        self._live = live
        self._lifecycle = lifecycle
        self._requests_max = requests_max
        self._request_timeout_ms = request_timeout_ms
        self._router_id = router_id
        self._queue = turns
        self._pace = pace
        self._waiting: dict[str, RoutedRequest] = {}
        self._looks = Looks()
        self._kinds: object = None
        """What tells the kinds of requests; see `_kind_of`."""
        self._places_kept: dict[int, _Kept] = {}
        """By group."""
        self._moved_ms = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, now_ms: int, request: NewRequest) -> list[RouterAction]:
        """Let a request in, to wait; `admit` starts what has its turn.

        Where ``requests_max`` live, the tenant with the longest queue gives places up for one with
        a shorter: a flood fills its own queue only. Later ones of a group have their places.
        What runs has nothing to give up, so some places are not for a tenant that has all others.

        Raises:
            CapacityError: ``requests_max`` live, and no queue is longer than this tenant's; or it
                has as many as one tenant may.
            ContextLengthError: longer at its end than any ready worker holds.
            RequestError: the request id is live already, or there is nothing to compute.
            RemoteFault: no worker is ready.
        """
        if self.find(request.request_id) or request.request_id in self._live:
            raise RequestError(
                "a request with this id is being served",
                param="request_id",
                request_id=request.request_id,
            )
        request.check()
        routed = RoutedRequest(now_ms, request, self._router_id)
        self._planner.check(routed)
        actions: list[RouterAction] = []
        kept = self._places_kept.get(request.group)
        if kept is not None and kept.num:
            kept.num -= 1
        else:
            self._leave_some_to_others(now_ms, request)
            num_kept = sum(one.num for one in self._places_kept.values())
            num_taken = len(self._live) + len(self._waiting) + num_kept
            num_missing = num_taken + 1 + request.num_following - self._requests_max
            if num_missing > 0:
                actions += self._make_places(now_ms, request, num_missing)
            if request.num_following:
                self._places_kept[request.group] = _Kept(request.tenant, request.num_following)
        self._waiting[request.request_id] = routed
        kind = self._kind_of(routed)
        if self._queue.push(request.tenant, request.request_id, routed, request.priority, kind):
            self._looks.came()
        self.counters["requests", ""] += 1
        if routed.revision is not None:
            routed.revision.num_requests += 1
        return actions

    def admit(self, now_ms: int) -> list[RouterAction]:
        """Start every waiting request whose turn it is and whose workers have room.

        Where many had better wait, or wait and are to be planned again, some are left to the next
        call: one comes with every report and tick, and no token is delivered meanwhile.
        """
        actions: list[RouterAction] = []
        num_held = 0
        while self._waiting and num_held < HOLDS_MAX:
            done = self._admit_one(now_ms)
            if done is None:
                break
            num_held += not done
            actions += done
        return actions

    def cancel(self, now_ms: int, request_id: str, reason: str) -> list[RouterAction]:
        """The client of a waiting request went away: no worker has heard of it."""
        request = self.find(request_id)
        if request is not None:
            self._leave(request)
            self._live.keep(now_ms, request, "cancelled", reason)
        return []

    def fail(self, now_ms: int, request_id: str, error: DisaggError) -> list[RouterAction]:
        """End a waiting request with an error; unknown ids are ignored."""
        request = self.find(request_id)
        return [] if request is None else [self._fail(now_ms, request, error)]

    def expire(self, now_ms: int) -> list[RouterAction]:
        """Fail what waits although nothing has been started for too long, or its SLO is missed."""
        actions: list[RouterAction] = []
        for request in list(self._waiting.values()):
            begun_ms = max(request.submitted_ms, self._moved_ms, request.held_until_ms)
            waited_ms = now_ms - begun_ms
            error: DisaggError | None = None
            if waited_ms > self._request_timeout_ms:
                error = ExpiredError(
                    f"no request was started for {waited_ms} ms; no worker has had room for it"
                )
            elif request.slo.is_missed(now_ms - request.received_ms):
                self.counters["requests_refused", "slo"] += 1
                error = SloError(
                    f"it has waited for longer than the {request.slo.ttft_ms} ms until its first "
                    "token",
                    param="disagg.ttft_ms",
                    retry_after_s=self.retry_after_s(now_ms),
                )
            if error is not None:
                actions.append(self._fail(now_ms, request, error))
        return actions

    def free_places(self, group: int) -> None:
        """Nothing more of this group will come; unknown ones are ignored."""
        self._places_kept.pop(group, None)

    def find(self, request_id: str) -> RoutedRequest | None:
        """The waiting request of that id."""
        return self._waiting.get(request_id)

    def num_waiting_by_revision(self) -> Counter[str]:
        """How many wait for workers of each revision, by its name."""
        waiting = (request.revision for request in self._waiting.values())
        return Counter(revision.name for revision in waiting if revision is not None)

    def retry_after_s(self, now_ms: int) -> int:
        """Seconds until what waits now should have been started, at the pace of the ends."""
        return self._pace.retry_after_s(now_ms, len(self._waiting) + 1)

    # --- inside

    def _admit_one(self, now_ms: int) -> list[RouterAction] | None:
        """Start or fail a waiting request, or find that it rather waits; None: nothing is left."""
        ready = self._fleet.roster.ready
        if not ready:  # it fails
            return self._look_at(now_ms, next(iter(self._waiting.values())))
        able = ready & self._fleet.rooms.roomy
        self._looks.see(able, ready & self._fleet.roster.idle)
        if not able or not self._looks.wanted(now_ms):
            return None
        self._sort()
        firsts = [request.request_id for _, request in self._queue.heads()]
        for request_id in self._looks.due(now_ms, firsts):
            done = self._look_at(now_ms, self._waiting[request_id])
            if done is not None:
                return done
        return None

    def _look_at(self, now_ms: int, request: RoutedRequest) -> list[RouterAction] | None:
        """Plan it; None where nothing comes of it, nothing where it has begun to wait by choice."""
        self._fleet.speeds.waiting.drop(request.request_id)
        revision = request.revision
        try:
            plan = self._planner.plan_in_turn(now_ms, request, len(self._waiting) - 1)
        except DisaggError as error:
            if isinstance(error, SloError):
                self.counters["requests_refused", "slo"] += 1
            return [self._fail(now_ms, request, error)]
        if request.revision is not revision:
            self._kinds = None
        if plan is None:
            if self._looks.is_held(request.request_id):
                self._queue.set_aside(request.tenant, request.request_id, is_aside=False)
            self._looks.no_room(now_ms, request.request_id)
            return None
        prefill = plan.prefill.incarnation
        if plan.hold_ms:
            if plan.estimate is not None:
                self._fleet.speeds.waiting.put(prefill, request.request_id, plan.estimate)
            if not self._looks.hold(now_ms, request, plan):
                return None
            self._queue.set_aside(request.tenant, request.request_id)  # others go before it
            return []
        to_compute = max(1, request.stream.num_prompt_tokens - plan.found_tokens)
        self._queue.take(request.tenant, to_compute, request.request_id)
        self._forget(request, was_first=True)
        self._moved_ms = now_ms
        self._fleet.speeds.planned(now_ms, prefill, plan.estimate, request.slo.ttft_ms)
        return self._lifecycle.begin(now_ms, request, plan)

    def _sort(self) -> None:
        """Tell the kinds of requests anew, if workers or revisions have come or gone by them."""
        sizes = self._fleet.roster.model_tokens.keys, self._fleet.roster.handover_tokens.keys
        kinds = sizes, self._fleet.ready_revisions()
        if kinds != self._kinds:
            self._kinds = kinds
            self._queue.sort(self._kind_of)

    def _kind_of(self, request: RoutedRequest) -> object:
        """Equal for requests that the same workers could serve, as far as limits go.

        Else one for a revision, or for the only large worker, that is full would hold up those of
        its tenant for which there is room.
        """
        revision, roster, stream = request.revision, self._fleet.roster, request.stream
        if revision is not None and not self._fleet.ready_in(revision):
            revision = None  # it moves to another one
        num_tokens = stream.num_prompt_tokens
        return (
            revision,
            roster.model_tokens.lowest_from(num_tokens + 1),  # to compute its prompt
            roster.model_tokens.lowest_from(stream.room_tokens),  # to decode it
            roster.handover_tokens.lowest_from(num_tokens),
        )

    def _leave_some_to_others(self, now_ms: int, request: NewRequest) -> None:
        """Refuse a request by which one tenant would have nearly all places; "" is everybody."""
        tenant = request.tenant
        most = self._requests_max - self._requests_max // OTHERS_PART
        num_own = self._live.num_by_tenant[tenant] + self._queue.num_waiting(tenant)
        num_own += sum(one.num for one in self._places_kept.values() if one.tenant == tenant)
        if not tenant or not num_own or num_own + 1 + request.num_following <= most:
            return
        self.counters["requests_refused", "capacity"] += 1
        raise CapacityError(
            f"tenant {tenant} has {num_own} requests that are served or wait; one may have {most} "
            f"of the {self._requests_max} (limits.requests_max)",
            request_id=request.request_id,
            retry_after_s=self.retry_after_s(now_ms),
        )

    def _make_places(self, now_ms: int, request: NewRequest, num: int) -> list[RouterAction]:
        """Refuse the last ones of the longest queue, or the new request itself."""
        longest = self._queue.longest()
        if longest is None or not self._queue.is_longer(longest, request.tenant, num):
            self.counters["requests_refused", "capacity"] += 1
            raise self._refusal(now_ms, request.request_id)
        self.counters["requests_refused", "capacity"] += num
        actions: list[RouterAction] = []
        for _ in range(num):
            last = self._queue.last(longest)
            actions.append(self._fail(now_ms, last, self._refusal(now_ms, last.request_id)))
        return actions

    def _refusal(self, now_ms: int, request_id: str) -> CapacityError:
        return CapacityError(
            f"{self._requests_max} requests are being served or wait (limits.requests_max)",
            request_id=request_id,
            retry_after_s=self.retry_after_s(now_ms),
        )

    def _leave(self, request: RoutedRequest) -> None:
        was_first = self._queue.is_first(request.tenant, request.request_id)
        self._queue.remove(request.tenant, request.request_id)
        self._forget(request, was_first=was_first)

    def _forget(self, request: RoutedRequest, *, was_first: bool) -> None:
        del self._waiting[request.request_id]
        self._looks.end(request.request_id, was_first=was_first)
        self._fleet.speeds.waiting.drop(request.request_id)

    def _fail(self, now_ms: int, request: RoutedRequest, error: DisaggError) -> Fail:
        self._leave(request)
        error.request_id = request.request_id
        said = f"{type(error).__name__}: {error.message}"
        self._live.keep(now_ms, request, "failed", said)
        return Fail(request.request_id, error)
