"""A score of cached prefix and queue chooses who prefills; what fits is handed over."""

from dataclasses import replace

from disagg.routing.policy.candidates import Candidates
from disagg.routing.policy.policy import misplaced
from disagg.routing.policy.prefix_then_load import PrefixThenLoad
from disagg.routing.policy.protocol import Candidate, Demand, Plan, PolicyOptions

LEVELS_MAX = 64
"""Different lengths of prefix that are looked at, longest first, and the shortest queue of all."""


class CacheAffinity:
    """The least of ``affinity_weight`` x uncached tokens + tokens that wait, as in Dynamo's router.

    Who decodes is chosen by load. Nothing is pulled from third workers. Where `PrefixThenLoad` does
    not hand over, and after a failed plan, everything is as it has it.
    """

    def __init__(self, options: PolicyOptions) -> None:
        self._weight = options.affinity_weight
        self._rule = PrefixThenLoad(options)

    def plan(self, demand: Demand, candidates: Candidates) -> Plan:
        """See `Policy.plan`."""
        plan = self._rule.plan(demand, candidates)
        if plan.local or not demand.is_first:
            return plan
        able = candidates.handing_over(demand.num_tokens)
        prefills = candidates.can_prefill & candidates.with_role("prefill") & able
        prefills &= candidates.partners(plan.decode, demand)
        prefills &= ~candidates.of([plan.decode.incarnation])
        if not prefills:
            return plan
        best = self._best(demand, candidates, prefills)
        reason = (
            f"prefill on {best.name} (score {self._score(best, demand):.0f}: prefix "
            f"{best.found_tokens} tokens, {best.prefill_queue[0]} tokens before it), decode on "
            f"{plan.decode.name} ({plan.decode.decode_load} requests there)"
        )
        return replace(plan, prefill=best, pull=None, reason=reason)

    def waits(self, best: Plan, now: Plan) -> bool:
        """See `Policy.waits`."""
        return misplaced(best, now)

    def _best(self, demand: Demand, candidates: Candidates, bits: int) -> Candidate:
        best = candidates.shortest_queue(bits)
        for number, (tokens, level) in enumerate(candidates.by_saved_tokens(bits)):
            # Shorter prefixes score no better than what they leave to compute.
            least = self._weight * (demand.num_tokens - tokens)
            if number >= LEVELS_MAX or least >= self._score(best, demand):
                break
            best = min(best, candidates.shortest_queue(level), key=lambda c: self._score(c, demand))
        return best

    def _score(self, candidate: Candidate, demand: Demand) -> float:
        uncached = demand.num_tokens - candidate.saved_tokens
        return self._weight * uncached + candidate.prefill_queue[0]
