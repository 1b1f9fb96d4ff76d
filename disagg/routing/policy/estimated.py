"""The plan that is expected to take the least time, of the request and of those it disturbs."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from disagg.routing.estimates.estimate import Estimate
from disagg.routing.policy.appraisal import Appraiser, considered
from disagg.routing.policy.candidates import Candidates
from disagg.routing.policy.policy import misplaced
from disagg.routing.policy.prefix_then_load import PrefixThenLoad
from disagg.routing.policy.protocol import Candidate, Demand, Plan, PolicyOptions
from disagg.routing.slo import missed

PLANS_MAX = 8
"""Plans that are compared, however many workers there are: all token streams stand still for tens
of microseconds by each. Twelve were no better in any simulated fleet.
"""


QUEUES_MAX = 2
"""Of the shortest queues: of equal ones one worker may be faster than another."""

QUEUE_MS_MAX = 150.0
"""A prompt that waits for longer where it goes can as well wait at the router, and be planned when
more is known: a worker with so much to do is not idle for lack of it."""

ROOM_MS_MAX = 150.0
"""If every plan waits for longer for memory or a place, prefill workers may decode as well; for
less their role is kept."""

HOLD_MS_MAX = 10_000
"""After so long it goes all the same, to its part of the worker's steps: shorter prompts, which
wait for less, could go before it for ever."""

LATE_MIN = 0.5
"""Of others' answers that are likely late by a plan: for fewer nobody waits."""
WORTH = 2.0
"""Others' answers that count as much as a request's own chance to be in time; for more of them it
had better be late itself. Not one: it waits for long then, and an estimate may be wrong."""
LATE_MIN_OF_LATE = 0.05
"""The same for a request that is late in any case, and has no more to lose."""

PATIENCE = 0.6
"""Of the time until its first token is due a request may wait so much by choice, its prefill
included: an estimate may be wrong."""


class Estimated:
    """Compares a few plans that could be best; everything else is as `PrefixThenLoad` has it.

    These are weighed: its plan; the best prefix and the shortest queues to prefill, each with the
    decode worker of least load and the one that holds most; decode workers alone, those that hold
    most, have the least load or the shortest queue; and each of these with a prefix pulled from a
    third worker. Where all that decode are full, prefill workers alone are weighed as well. The
    plan that takes the least time is best: until an answer's first
    `ANSWER_TOKENS`, and, with a weight, what others are held up by, those to come among them. An
    SLO that is missed counts as time as well, see `MISS_SHARE`. For a request that would be shed
    only plans count by which it is not, if there are any.

    A request waits at the router if it would only wait where it goes; and, with a bound for its
    first token and time left until then, if others would miss their bounds by it. Where more of
    them would than its own chance is worth it waits on, and who is late anyway waits for anybody;
    not where no worker is fast enough for its bound, which says nothing then.

    Where too little was measured, and where an earlier plan of the request has failed, nothing is
    weighed: so speeds are measured by the plans that are made anyway.
    """

    def __init__(self, options: PolicyOptions) -> None:
        self._options = options
        self._rule = PrefixThenLoad(options)

    def plan(self, demand: Demand, candidates: Candidates) -> Plan:
        """See `Policy.plan`."""
        appraiser = Appraiser(demand, candidates.speeds, self._options.slo_tpot_ms)
        able = candidates.can_prefill
        appraiser.think_of_newcomers(candidates.shortest_queues(able, QUEUES_MAX))
        first = appraiser.appraise(self._rule.plan(demand, candidates))
        if first.estimate is None or not demand.is_first:
            return first
        plans = {_key(first.prefill, first.decode, first.pull): first}
        others = _Others(demand, candidates)
        for prefill, decode, pull in others.plans():
            if len(plans) >= PLANS_MAX:
                break
            key = _key(prefill, decode, pull)
            if key not in plans:
                plans[key] = appraiser.appraise(Plan(prefill, decode, "", pull))
        if all(
            one.estimate is None or one.estimate.room_ms > ROOM_MS_MAX for one in plans.values()
        ):
            for place in others.places_elsewhere():
                plans[_key(place, place, None)] = appraiser.appraise(Plan(place, place, ""))
        known = [(one, found) for one in plans.values() if (found := one.estimate) is not None]
        kept = [one for one, found in known if not demand.is_shed(found.ttft_ms)]
        best = min(kept or [one for one, _ in known], key=self._cost_ms)
        hold_ms = self._hold_ms(best.estimate, demand)
        if hold_ms and kept:  # else it is refused, and what was weighed is shown
            return replace(best, hold_ms=hold_ms)
        shown = tuple(considered(one, chosen=one is best) for one in plans.values())
        return replace(best, considered=shown, reason=_reason(best, first))

    def waits(self, best: Plan, now: Plan) -> bool:
        """See `Policy.waits`. Who has no room has to be done with its queue first."""
        if best.estimate is None or now.estimate is None:
            return misplaced(best, now)
        if now.decode.info.role == "prefill" != best.decode.info.role:
            return True  # its own decodes would be in the way of the prompts that follow
        more_ms = max(0.0, best.estimate.drain_ms - best.estimate.queue_ms)
        return self._cost_ms(best) + more_ms < self._cost_ms(now)

    def _hold_ms(self, found: Estimate | None, demand: Demand) -> float:
        if found is None:
            return 0.0
        left_ms = HOLD_MS_MAX - demand.waited_ms
        if found.queue_ms > QUEUE_MS_MAX:
            return max(0.0, left_ms)
        bound_ms = demand.slo.ttft_ms
        if not bound_ms:
            return 0.0
        ttft_ms = demand.waited_ms + found.ttft_ms
        worth = max(LATE_MIN_OF_LATE, WORTH * (1 - missed(ttft_ms / bound_ms)))
        if found.num_made_late >= worth and found.ttft_alone_ms <= bound_ms:
            return max(0.0, left_ms)
        if found.num_made_late < LATE_MIN:
            return 0.0
        return max(0.0, min(PATIENCE * bound_ms - ttft_ms, left_ms))

    def _cost_ms(self, plan: Plan) -> float:
        assert plan.estimate is not None
        return plan.estimate.cost_ms(self._options.others_weight) + plan.missed_ms


_Parts = tuple[Candidate, Candidate, Candidate | None]
"""Who prefills, who decodes, and whose prefix is pulled."""


def _key(prefill: Candidate, decode: Candidate, pull: Candidate | None) -> tuple[int, int, int]:
    """Tells plans apart: for each worker there is one `Candidate`."""
    return id(prefill), id(decode), id(pull)


def _reason(best: Plan, first: Plan) -> str:
    assert best.estimate is not None
    expected = f"expected TTFT {best.estimate.ttft_ms:.0f} ms"
    if best is first:
        return f"{best.reason}; {expected}"
    assert first.estimate is not None
    saved = first.estimate.ttft_ms
    return f"{_parts(best)}; {expected}, by the rule of prefixes and load {saved:.0f} ms"


def _parts(plan: Plan) -> str:
    prefill, decode = plan.prefill, plan.decode
    prefix = f"{prefill.name} (prefix {prefill.found_tokens} tokens"
    load = f"{decode.decode_load} requests there)"
    if plan.local:
        parts = f"local on {prefix}, {load}"
    else:
        parts = f"prefill on {prefix}), decode on {decode.name} ({load}"
    if plan.pull is None:
        return parts
    more = plan.found_tokens - prefill.found_tokens
    return f"{parts}; pulls {more} more tokens of the prefix from {plan.pull.name}"


class _Others:
    """Plans besides the rule's that could be better, each looked for when it is asked for."""

    def __init__(self, demand: Demand, candidates: Candidates) -> None:
        self._demand = demand
        self._all = candidates
        self._longest_tokens, self._owners = candidates.most_saved(candidates.everybody)

    def plans(self) -> Iterator[_Parts]:
        """Those of one worker and those of two by turns, as not all of them may be weighed."""
        alone = ((place, place) for place in self._places_alone())
        for both in zip_longest(alone, self._pairs()):
            for workers in filter(None, both):
                yield from self._with_pull(*workers)

    def _places_alone(self) -> Iterator[Candidate]:
        fitting = self._all.can_prefill & self._all.can_decode & self._all.with_role("decode")
        if not fitting:
            return
        _, most = self._all.most_saved(fitting)
        yield self._all.least_loaded(most)
        yield self._all.least_loaded(fitting)
        yield from self._all.shortest_queues(fitting, QUEUES_MAX)

    def places_elsewhere(self) -> Iterator[Candidate]:
        """Prefill workers alone, where an answer is in the way of others' prompts."""
        fitting = self._all.can_prefill & self._all.can_decode & ~self._all.with_role("decode")
        yield from self._all.shortest_queues(fitting, QUEUES_MAX)

    def _pairs(self) -> Iterator[tuple[Candidate, Candidate]]:
        num_tokens = self._demand.num_tokens
        able = self._all.handing_over(num_tokens)
        prefills = self._all.can_prefill & self._all.with_role("prefill") & able
        decodes = self._all.can_decode & self._all.with_role("decode") & able
        if not prefills or not decodes:
            return
        best = next(self._all.by_prefill_order(prefills))
        for prefill in (best, *self._all.shortest_queues(prefills, QUEUES_MAX)):
            partners = decodes & self._all.partners(prefill, self._demand)
            partners &= ~self._all.of([prefill.incarnation])
            if not partners:
                continue
            yield prefill, self._all.first_to_decode(partners)
            _, most = self._all.most_saved(partners)
            yield prefill, self._all.least_loaded(most)

    def _with_pull(self, prefill: Candidate, decode: Candidate) -> Iterator[_Parts]:
        yield prefill, decode, None
        if self._longest_tokens <= prefill.found_tokens:
            return
        owners = self._owners & self._all.partners(prefill, self._demand)
        if not owners:
            return
        owner = self._all.least_loaded(owners)
        if owner.found_tokens > prefill.found_tokens:
            yield prefill, decode, owner
