"""From a request and the fleet to a plan: who can serve it at all, then the policy's choice."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import ceil

from disagg.errors import (
    ContextLengthError,
    DisaggError,
    InvariantViolation,
    PlanError,
    RemoteFault,
    SloError,
)
from disagg.routing.cache_reset import CacheResets
from disagg.routing.end_pace import RETRY_AFTER_MAX_S
from disagg.routing.fleet import Fleet
from disagg.routing.policy.appraisal import Appraiser, considered
from disagg.routing.policy.candidates import Candidates
from disagg.routing.policy.policy import Policy
from disagg.routing.policy.protocol import Demand, Plan
from disagg.routing.request import RoutedRequest
from disagg.routing.revisions import Revision
from disagg.routing.trials import Trials

RELIEF_QUEUES_MAX = 4
"""Workers that are asked for memory to spare, those with the shortest queues."""
RELIEF_QUEUE_MS = 150.0
"""Who would wait for longer elsewhere stays where it lost its memory: it may come back sooner."""

OnBug = Callable[[str, Exception], None]
"""Takes a request's id and what was raised."""


class Planner:
    """Calls the policy, and holds its plan to what no policy may break.

    The policy sees the workers of the request's own revision only: no plan has workers of two, and
    what was delivered goes on where it began.

    Args:
        fleet: the workers.
        policies: each chooses among those that can serve a request, by `NewRequest.hand_over`.
        resets: of the prefix caches; nobody pulls a prefix of a worker that may have missed the
            last one, and no lease from before it is taken over.
        slo_tpot_ms: what everybody's time per token should stay below, for estimates; 0: any.
        on_bug: told of what is raised while a request is planned and is no `DisaggError`; None: it
            is raised on, as tests and explorers want it.
    """

    def __init__(
        self,
        fleet: Fleet,
        policies: Mapping[bool | None, Policy],
        resets: CacheResets,
        slo_tpot_ms: float = 0.0,
        on_bug: OnBug | None = None,
    ) -> None:
        self._fleet = fleet
        self._policies = policies
        self._slo_tpot_ms = slo_tpot_ms
        self._resets = resets
        self._on_bug = on_bug
        self._trials = Trials()

    def plan(self, now_ms: int, request: RoutedRequest) -> Plan:
        """Choose the workers of the request's next generation.

        Raises:
            RemoteFault: no worker is ready.
            ContextLengthError: no ready worker holds the request up to its end.
            DisaggError: the policy refuses it, or fails by a bug.
        """
        with self._this_one_alone(request):
            revision, ready = self._settle(request)
            policy = self._policies[request.hand_over]
            demand = self._demand(now_ms, request)
            return self._plan(policy, demand, self._able(request, revision, ready))

    def plan_in_turn(self, now_ms: int, request: RoutedRequest, num_behind: int = 0) -> Plan | None:
        """The same for a request that can wait; None while there is no room for it.

        Who has no room can still be pulled from. Where the policy would rather have it wait
        although there is room, `Plan.hold_ms` says how long.

        Raises:
            SloError: no plan keeps the SLO of a request that is to be shed then.
            DisaggError: as `plan` does.
        """
        with self._this_one_alone(request):
            revision, ready = self._settle(request)
            policy = self._policies[request.hand_over]
            demand = self._demand(now_ms, request, num_behind)
            candidates = self._able(request, revision, ready)
            plan = self._plan(policy, demand, candidates)
            is_trial = self._shed(now_ms, request, demand, plan)
            roomy = self._fleet.rooms.roomy
            chosen = candidates.of((plan.prefill.incarnation, plan.decode.incarnation))
            if chosen & ~roomy:
                with_room = candidates.only(roomy)
                if not with_room.can_decode:
                    return None
                other = self._plan(policy, demand, with_room)
                if policy.waits(plan, other):
                    return None
                plan = other
            if request.held_until_ms and not plan.hold_ms:
                why = f"{plan.reason}; waited by choice, {demand.waited_ms} ms"
                plan = replace(plan, reason=why)
            if is_trial:
                why = f"{plan.reason}; too late by what was measured: it goes to measure it again"
                plan = replace(plan, reason=why)
            return plan

    def check(self, request: RoutedRequest) -> None:
        """Raise what `plan` raises where nobody could serve the request, now or in its turn."""
        revision, ready = self._settle(request)
        if not ready & self._fleet.roster.model_tokens.at_least(request.stream.room_tokens):
            error = self._nobody_can(request, revision)
            error.request_id = request.request_id
            raise error

    def _settle(self, request: RoutedRequest) -> tuple[Revision, int]:
        """The request's revision with the bits of its ready workers; without any, another one.

        Nothing that was delivered moves: another revision would go on with other tokens.
        """
        revision = request.revision
        if revision is not None:
            ready = self._fleet.ready_in(revision)
            if ready or request.stream.has_begun:
                return revision, ready
        able = self._fleet.ready_revisions(request.stream.room_tokens)
        revision = self._fleet.revisions.assign(request.request_id, able)
        request.assign(revision)
        return revision, self._fleet.ready_in(revision)

    def _shed(self, now_ms: int, request: RoutedRequest, demand: Demand, plan: Plan) -> bool:
        """Refuse what wants its first token sooner than the best plan has it, if it is to be shed.

        Returns:
            Whether it would be refused, but goes, see `Trials`.

        Raises:
            SloError: with the time after which as much work is done as is too much, if that helps.
        """
        own_ms, alone_ms = 0.0, 0.0
        if plan.estimate is not None:
            own_ms, alone_ms = plan.estimate.ttft_ms, plan.estimate.ttft_alone_ms
        if not demand.is_shed(own_ms):
            return False
        ttft_ms, wanted_ms = demand.waited_ms + own_ms, demand.slo.ttft_ms
        is_slow = alone_ms > wanted_ms
        if (
            is_slow
            and demand.waited_ms <= wanted_ms
            and self._trials.may_go(now_ms, request, own_ms)
        ):
            return True
        request.refused = plan.considered or (considered(plan),)
        retry_after_s = max(1, min(RETRY_AFTER_MAX_S, ceil((ttft_ms - wanted_ms) / 1000)))
        raise SloError(
            f"the first token is expected after {ttft_ms:.0f} ms, {wanted_ms} are wanted",
            param="disagg.ttft_ms",
            retry_after_s=0 if is_slow else retry_after_s,
        )

    def _able(self, request: RoutedRequest, revision: Revision, ready: int) -> Candidates:
        """The candidates, of which at least one can end the request."""
        candidates = self._candidates(request, revision, ready)
        if not candidates.can_decode:
            raise self._nobody_can(request, revision)
        return candidates.sparing(self._fleet.roster.stalled)

    @contextmanager
    def _this_one_alone(self, request: RoutedRequest) -> Iterator[None]:
        """A bug in the plan of one request is that one's alone: nothing has changed for others.

        A request that waits is planned with every report: raised on, it would end the session of
        each worker, and at last the router.
        """
        try:
            yield
        except DisaggError:
            raise
        except Exception as error:
            if self._on_bug is None:
                raise
            self._on_bug(request.request_id, error)
            raise PlanError("planning it failed, the router's log says how") from error

    def _plan(self, policy: Policy, demand: Demand, candidates: Candidates) -> Plan:
        plan = policy.plan(demand, candidates)
        if not (plan.prefill.can_prefill and plan.decode.can_decode):
            raise InvariantViolation(f"a plan that has no room where it goes: {plan.reason}")
        if plan.pull is not None and not self._resets.has_reset(plan.pull.incarnation):
            why = f"{plan.reason}: its owner's cache is being reset"
            plan = replace(plan, pull=None, reason=why, estimate=None, considered=())
        if plan.estimate is None:
            appraiser = Appraiser(demand, self._fleet.speeds, self._slo_tpot_ms)
            plan = appraiser.appraise(plan)
        return plan

    def take_over(self, now_ms: int, request: RoutedRequest) -> Plan | None:
        """Another decode worker for what is computed and leased already.

        That is a sealed prompt whose decode worker was lost too early, or what a worker that was
        about to end has decoded. Not the policy's: the least loaded worker that may pull it does.
        None where there is no such lease, or nobody to pull it: then the rest is planned as ever.
        Only where the token that came with the seal is the last one that was accepted. None, too,
        where a bug keeps it from being found.
        """
        try:
            with self._this_one_alone(request):
                return self._heir(now_ms, request)
        except PlanError:
            return None

    def _heir(self, now_ms: int, request: RoutedRequest) -> Plan | None:
        lost, revision = request.current, request.revision
        if revision is None or lost.started_ms <= self._resets.begun_ms:
            return None  # its KV would be found at the new worker, although all was forgotten
        num_tokens = len(request.stream.tokens)
        if lost.lease_tokens is None or num_tokens != lost.lease_tokens + 1:
            return None
        demand = self._demand(now_ms, request)
        candidates = self._candidates(request, revision, self._fleet.ready_in(revision))
        moves, gone = lost.kept_at is not None, lost.decode.incarnation
        # Who drains is not ready, but lends on.
        owner_bit = self._fleet.roster.bits.of_one(lost.lease_owner.incarnation)
        if not owner_bit:
            return None
        owner, exclusions = candidates.of_bit(owner_bit), demand.exclusions
        readers = candidates.can_decode & candidates.handing_over(num_tokens)
        readers &= candidates.partners(owner, demand) & ~owner_bit
        readers &= ~candidates.of(exclusions.workers | exclusions.decode | {gone})
        readers &= ~self._fleet.roster.stalled
        decodes = readers & candidates.with_role("decode")
        # A prompt is computed again where its lease is rather than moved to a prefill worker.
        readers = decodes or (readers if moves else 0)
        if not readers:
            return None
        reader = candidates.first_to_decode(readers)
        held = "while it drains" if moves else f"for {gone.worker_id}, which was lost"
        why = f"decode on {reader.name} takes over the lease that {owner.name} holds {held}"
        return Plan(owner, reader, why, takes_over=True)

    def relief(self, now_ms: int, request: RoutedRequest) -> Plan | None:
        """A worker with memory to spare, for an answer that was preempted where it is decoded.

        Not the policy's: of the shortest queues the one with the sooner next token computes all
        that there is again. None where nobody has room at once, as far as is known: those before it
        give its worker's memory back some time.
        """
        try:
            with self._this_one_alone(request):
                return self._with_memory(now_ms, request)
        except PlanError:
            return None

    def _with_memory(self, now_ms: int, request: RoutedRequest) -> Plan | None:
        revision, full = request.revision, request.current.decode
        if revision is None:
            return None
        demand = self._demand(now_ms, request)
        candidates = self._candidates(request, revision, self._fleet.ready_in(revision))
        able = candidates.can_prefill & candidates.can_decode & self._fleet.rooms.roomy
        able &= ~self._fleet.roster.stalled & ~candidates.of([full.incarnation])
        able &= ~candidates.of(demand.exclusions.workers | demand.exclusions.decode)
        appraiser = Appraiser(demand, self._fleet.speeds, self._slo_tpot_ms)
        why = f"{full.incarnation.worker_id} has no memory for it"
        plans = [
            appraiser.appraise(Plan(place, place, f"local on {place.name}: {why}"))
            for place in candidates.shortest_queues(able, RELIEF_QUEUES_MAX)
        ]
        found = [
            (one.estimate.ttft_ms, number)
            for number, one in enumerate(plans)
            if one.estimate is not None
            and not one.estimate.room_ms
            and one.estimate.queue_ms <= RELIEF_QUEUE_MS
        ]
        return plans[min(found)[1]] if found else None

    def can_go_on_elsewhere(self, request: RoutedRequest) -> bool:
        """Whether a worker that has not stalled can do all that a begun request still needs."""
        revision = request.revision
        ready = self._fleet.ready_in(revision) if revision is not None else 0
        if revision is None or not ready:
            return False
        candidates = self._candidates(request, revision, ready)
        able = candidates.can_prefill & candidates.can_decode
        return bool(able & ~self._fleet.roster.stalled)

    def _demand(self, now_ms: int, request: RoutedRequest, num_behind: int = 0) -> Demand:
        self._fleet.speeds.now(now_ms)
        return Demand(
            len(request.stream.tokens),
            request.stream.end,
            request.exclusions,
            self._fleet.bad_pairs.at(now_ms),
            request.slo,
            max(0, now_ms - request.received_ms),
            not request.generations,
            num_behind,
        )

    def _candidates(self, request: RoutedRequest, revision: Revision, ready: int) -> Candidates:
        num_tokens, room_tokens = len(request.stream.tokens), request.stream.room_tokens
        # Who computes log-probabilities of the prompt takes nothing of it from a cache.
        hashes = () if request.stream.scores.num_wanted is not None else request.hashes
        roster, rejected = self._fleet.roster, request.outgrown_tokens
        return Candidates(
            roster,
            self._fleet.match(revision, num_tokens, hashes),
            ready,
            can_prefill=ready & roster.model_tokens.at_least(max(num_tokens, rejected) + 1),
            can_decode=ready & roster.model_tokens.at_least(max(room_tokens, rejected + 1)),
            speeds=self._fleet.speeds,
        )

    def _nobody_can(
        self, request: RoutedRequest, revision: Revision
    ) -> RemoteFault | ContextLengthError:
        largest = self._fleet.max_model_tokens(revision)
        if not largest:
            where = f" in revision {request.revision.name!r}" if request.revision else ""
            return RemoteFault(f"no worker is ready{where}", retry_after_s=1)
        if request.outgrown_tokens:
            return ContextLengthError(f"no larger worker is ready: {request.current.cause}")
        return ContextLengthError(
            f"prompt and max_tokens need {request.stream.room_tokens} tokens, the largest worker "
            f"that is ready serves {largest}",
            param="max_tokens",
        )
