"""Hand over, or prefill at the decode worker: the fixed rules of other systems.

Dynamo's conditional disaggregation has such a bound on what is not cached at the decode worker
(DEP ai-dynamo/dynamo#11514), one on the load of the prefill workers with a guard for busy decode
workers, and either of the two; llm-d's decider has the first. Here the decode worker is the one
that holds most of the prompt, the least loaded of those, and pools stand in for their block counts.
"""

from collections.abc import Callable

from disagg.routing.policy.candidates import Candidates
from disagg.routing.policy.policy import misplaced
from disagg.routing.policy.prefix_then_load import PrefixThenLoad
from disagg.routing.policy.protocol import Candidate, Demand, Plan, PolicyOptions

Condition = Callable[[PolicyOptions, Candidate, Demand, Candidates], str]
"""Why a decode worker should prefill as well; "" where it should not."""


def few_uncached(
    options: PolicyOptions, place: Candidate, demand: Demand, candidates: Candidates
) -> str:
    """Little of the prompt is to be computed there, by number and by share."""
    uncached = demand.num_tokens - place.found_tokens
    few = uncached <= options.uncached_tokens_max
    if few and uncached <= options.uncached_share_max * demand.num_tokens:
        return f"{uncached} of {demand.num_tokens} tokens are not cached there"
    return ""


def prefill_busy(
    options: PolicyOptions, place: Candidate, demand: Demand, candidates: Candidates
) -> str:
    """All prefill workers have long queues, and the decode worker has room."""
    prefills = candidates.can_prefill & candidates.with_role("prefill")
    if not prefills:
        return ""
    queued, _ = candidates.shortest_queue(prefills).prefill_queue
    stats = place.worker.stats
    num_blocks = stats.num_blocks_usable if stats is not None else 0
    num_taken = num_blocks - place.num_blocks_free
    if queued > options.prefill_busy_tokens and (
        num_taken <= options.decode_busy_share * num_blocks
    ):
        return f"{queued} tokens wait at every prefill worker"
    return ""


class Conditional:
    """Prefills at the decode worker under a condition; everything else as `PrefixThenLoad`.

    Args:
        options: of the router.
        conditions: one of them is enough.
    """

    def __init__(self, options: PolicyOptions, *conditions: Condition) -> None:
        self._options = options
        self._conditions = conditions
        self._rule = PrefixThenLoad(options)

    def plan(self, demand: Demand, candidates: Candidates) -> Plan:
        """See `Policy.plan`."""
        plan = self._rule.plan(demand, candidates)
        if plan.local or not demand.is_first:
            return plan
        places = candidates.can_prefill & candidates.can_decode & candidates.with_role("decode")
        if not places:
            return plan
        _, most = next(candidates.by_saved_tokens(places))
        place = candidates.least_loaded(most)
        for condition in self._conditions:
            if why := condition(self._options, place, demand, candidates):
                reason = f"local on {place.name} (prefix {place.found_tokens} tokens): {why}"
                return Plan(place, place, reason)
        return plan

    def waits(self, best: Plan, now: Plan) -> bool:
        """See `Policy.waits`."""
        return misplaced(best, now)


def uncached_threshold(options: PolicyOptions) -> Conditional:
    """Prefill where it decodes if little is to be computed there."""
    return Conditional(options, few_uncached)


def prefill_load(options: PolicyOptions) -> Conditional:
    """Prefill where it decodes if prefill workers are busy."""
    return Conditional(options, prefill_busy)


def uncached_or_load(options: PolicyOptions) -> Conditional:
    """Either of the two."""
    return Conditional(options, few_uncached, prefill_busy)
