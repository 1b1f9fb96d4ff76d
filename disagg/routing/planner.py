"""From a request and the fleet to a plan: who can serve it at all, then the policy's choice."""

from collections.abc import Sequence
from dataclasses import replace

from disagg.errors import ContextLengthError, InvariantViolation, RemoteFault
from disagg.routing.cache_reset import CacheResets
from disagg.routing.fleet import Fleet
from disagg.routing.policy.protocol import Candidate, Demand, Plan, Policy
from disagg.routing.request import RoutedRequest


class Planner:
    """Calls the policy, and holds its plan to what no policy may break.

    Args:
        fleet: the workers.
        policy: chooses among those that can serve the request.
        resets: of the prefix caches; nobody pulls a prefix of a worker that may have missed the
            last one, and no lease from before it is taken over.
    """

    def __init__(self, fleet: Fleet, policy: Policy, resets: CacheResets) -> None:
        self._fleet = fleet
        self._policy = policy
        self._resets = resets

    def plan(self, now_ms: int, request: RoutedRequest) -> Plan:
        """Choose the workers of the request's next generation.

        Raises:
            RemoteFault: no worker is ready.
            ContextLengthError: no ready worker holds the request up to its end.
            DisaggError: the policy refuses it.
        """
        candidates = self._candidates(request)
        if not any(candidate.can_decode for candidate in candidates):
            raise _nobody_can(request, candidates)
        plan = self._policy.plan(self._demand(now_ms, request), candidates)
        if not (plan.prefill.can_prefill and plan.decode.can_decode):
            raise InvariantViolation(f"a plan that has no room where it goes: {plan.reason}")
        if plan.pull is not None and not self._resets.has_reset(plan.pull.incarnation):
            why = f"{plan.reason}: its owner's cache is being reset"
            return replace(plan, pull=None, reason=why)
        return plan

    def take_over(self, now_ms: int, request: RoutedRequest) -> Plan | None:
        """Another decode worker for a sealed prompt whose decode worker was lost too early.

        Not the policy's: the prompt is computed and its lease is open, so the least loaded worker
        that may pull it does. None where there is no such lease, or nobody to pull it: then the
        rest is planned as ever. Only where token 0, which came with the seal, is all that was
        accepted.
        """
        lost = request.current
        if lost.started_ms <= self._resets.begun_ms:
            return None  # its KV would be found at the new worker, although all was forgotten
        num_tokens = len(request.stream.tokens)
        if lost.lease_tokens is None or num_tokens != lost.lease_tokens + 1:
            return None
        demand = self._demand(now_ms, request)
        candidates = self._candidates(request)
        owner = next((c for c in candidates if c.incarnation == lost.prefill.incarnation), None)
        excluded = demand.exclusions.workers | demand.exclusions.decode | set(lost.workers)
        readers = [
            c
            for c in candidates
            if c.view.info.role in ("decode", "both")
            and c.incarnation not in excluded
            and c.can_decode
            and num_tokens <= c.view.info.handover_tokens_max
            and owner is not None
            and demand.may_pair(owner, c)
        ]
        if owner is None or not readers:
            return None
        reader = min(readers, key=lambda c: c.decode_order)
        why = (
            f"decode on {reader.name} takes over the lease that {owner.name} holds for "
            f"{lost.decode.incarnation.worker_id}, which was lost"
        )
        return Plan(owner, reader, why, takes_over=True)

    def _demand(self, now_ms: int, request: RoutedRequest) -> Demand:
        return Demand(
            len(request.stream.tokens),
            request.stream.end,
            request.exclusions,
            self._fleet.bad_pairs(now_ms),
        )

    def _candidates(self, request: RoutedRequest) -> list[Candidate]:
        num_tokens, end = len(request.stream.tokens), request.stream.end
        hits = self._fleet.match(num_tokens, request.hashes)
        rejected = request.outgrown_tokens
        return [
            Candidate(
                view,
                hits[view.info.incarnation],
                can_prefill=view.info.max_model_tokens > max(num_tokens, rejected),
                can_decode=view.info.max_model_tokens >= max(end, rejected + 1),
            )
            for view in self._fleet.views()
            if view.ready
        ]


def _nobody_can(
    request: RoutedRequest, candidates: Sequence[Candidate]
) -> RemoteFault | ContextLengthError:
    if not candidates:
        return RemoteFault("no worker is ready")
    if request.outgrown_tokens:
        return ContextLengthError(f"no larger worker is ready: {request.current.cause}")
    largest = max(c.view.info.max_model_tokens for c in candidates)
    return ContextLengthError(
        f"prompt and max_tokens need {request.stream.end} tokens, the largest worker that is "
        f"ready serves {largest}",
        param="max_tokens",
    )
