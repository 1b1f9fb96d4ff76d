"""The default policy: the longest usable prefix prefills, the shortest queue decodes."""

from dataclasses import replace

from disagg.routing.policy.candidates import Candidates
from disagg.routing.policy.policy import misplaced
from disagg.routing.policy.protocol import Candidate, Demand, Plan, PolicyOptions
from disagg.routing.worker_bits import is_single


class PrefixThenLoad:
    """A prefill and a decode worker, or one worker where a hand-over cannot or need not be.

    The worker that prefills pulls from another one that has at least ``pull_tokens_min`` more
    tokens of the prefix, whatever its role; of these from the one that has the most. What the
    owner has in tiers it loads first.

    A decode worker whose tiers have so much more of the prompt than the worker that would prefill
    it serves the request alone, unless more than ``decode_prefill_tokens_max`` tokens are left to
    compute there: longer prefills would keep its decodes waiting.
    """

    def __init__(self, options: PolicyOptions) -> None:
        self._pull_tokens_min = max(1, options.pull_tokens_min)
        self._decode_prefill_tokens_max = options.decode_prefill_tokens_max

    def plan(self, demand: Demand, candidates: Candidates) -> Plan:
        """See `Policy.plan`."""
        plan = _choose(demand, candidates)
        if (loads := self._loading(demand, plan, candidates)) is not None:
            return loads
        hit_tokens = plan.prefill.found_tokens
        if demand.num_tokens - hit_tokens < self._pull_tokens_min:
            return plan
        owners = candidates.everybody & ~candidates.of(demand.exclusions.workers)
        saved_tokens, best = candidates.most_saved(owners)
        if saved_tokens - hit_tokens < self._pull_tokens_min:
            return plan  # not even who has the most of all has enough
        owners &= candidates.partners(plan.prefill, demand)
        saved_tokens, best = candidates.most_saved(owners)
        if saved_tokens - hit_tokens < self._pull_tokens_min:
            return plan
        owner = candidates.least_loaded(best)
        more = owner.found_tokens - hit_tokens
        why = f"{plan.reason}; pulls {more} more tokens of the prefix from {owner.name}"
        return replace(plan, pull=owner, reason=why)

    def waits(self, best: Plan, now: Plan) -> bool:
        """See `Policy.waits`."""
        return misplaced(best, now)

    def _loading(self, demand: Demand, plan: Plan, candidates: Candidates) -> Plan | None:
        """A decode worker alone, which loads what the plan's prefill worker would compute."""
        if plan.local:
            return None
        exclusions = demand.exclusions
        bits = candidates.can_decode & candidates.with_role("decode")
        bits &= ~candidates.of(exclusions.workers | exclusions.decode)
        saved_min = plan.prefill.saved_tokens + self._pull_tokens_min
        able = [
            c
            for c in candidates.loaders(bits, saved_min)
            if c.saved_tokens >= saved_min
            and demand.num_tokens - c.found_tokens <= self._decode_prefill_tokens_max
        ]
        if not able:
            return None
        best = min(able, key=lambda c: (-c.saved_tokens, c.decode_order))
        tiers = ", ".join(f"{n} blocks from {best.tier_name(tier)}" for tier, n in best.loads)
        return _local(best, f"it loads {tiers}")


def _choose(demand: Demand, candidates: Candidates) -> Plan:
    """Choose who prefills and who decodes, without a pull."""
    exclusions = demand.exclusions
    at_fault, full = candidates.of(exclusions.workers), candidates.of(exclusions.decode)
    fresh = candidates.can_prefill & ~at_fault
    if not fresh & candidates.can_decode:
        fresh = candidates.can_prefill
    fitting = fresh & candidates.can_decode
    if exclusions.local_on is not None:
        local_on = candidates.of([exclusions.local_on]) & fitting & ~(at_fault | full)
        if local_on:
            return _local(candidates.of_bit(local_on), "no hand-over after one failed")
    if is_single(fresh):
        return _local(candidates.of_bit(fresh), "the only worker that is ready and not at fault")
    prefills = fresh & candidates.with_role("prefill")
    decodes = fitting & candidates.with_role("decode")
    if not prefills or not decodes:
        missing = "decode" if prefills else "prefill"
        return _best_local(candidates, fitting, full, f"no {missing} worker is ready")
    tokens = demand.num_tokens
    handing_over = candidates.handing_over(tokens)
    prefills, decodes = prefills & handing_over, decodes & handing_over
    if not prefills or not decodes:
        return _best_local(candidates, fitting, full, f"{tokens} tokens are too many to hand over")
    roomy = decodes & ~full
    if not roomy:
        return _best_local(candidates, fitting, full, "no other decode worker has room")
    for prefill in candidates.by_prefill_order(candidates.with_partners(prefills, roomy)):
        if partners := roomy & candidates.partners(prefill, demand):
            return _paired(prefill, candidates.first_to_decode(partners))
    why = "no two workers can hand over to each other now"
    return _best_local(candidates, fitting, full, why)


def _best_local(candidates: Candidates, bits: int, full: int, why: str) -> Plan:
    return _local(next(candidates.by_prefill_order(bits & ~full or bits)), why)


def _local(candidate: Candidate, why: str) -> Plan:
    hit = candidate.found_tokens
    return Plan(candidate, candidate, f"local on {candidate.name} (prefix {hit} tokens): {why}")


def _paired(prefill: Candidate, decode: Candidate) -> Plan:
    if prefill.incarnation == decode.incarnation:
        return _local(prefill, "best for prefill and for decode")
    queued, waiting = prefill.prefill_queue
    return Plan(
        prefill,
        decode,
        f"prefill on {prefill.name} (prefix {prefill.found_tokens} tokens, "
        f"{queued} tokens and {waiting} requests before it), decode on "
        f"{decode.name} ({decode.decode_load} requests there, "
        f"{decode.num_blocks_free} blocks free)",
    )
