"""The policies as they look at one worker after the other: what plans made with bits must equal."""

from collections.abc import Sequence
from dataclasses import replace

from disagg.routing.exclusions import Exclusions
from disagg.routing.policy.protocol import Candidate, Demand, Plan, PolicyOptions


class PlainPrefixThenLoad:
    """As `PrefixThenLoad`."""

    def __init__(self, options: PolicyOptions) -> None:
        self._pull_tokens_min = max(1, options.pull_tokens_min)
        self._decode_prefill_tokens_max = options.decode_prefill_tokens_max

    def plan(self, demand: Demand, candidates: Sequence[Candidate]) -> Plan:
        """See `Policy.plan`."""
        plan = _choose(demand, candidates)
        if (loads := self._loading(demand, plan, candidates)) is not None:
            return loads
        hit_tokens = plan.prefill.found_tokens
        owners = [
            c
            for c in candidates
            if c.saved_tokens - hit_tokens >= self._pull_tokens_min
            and c.incarnation not in demand.exclusions.workers
            and may_pair(demand, plan.prefill, c)
        ]
        if not owners:
            return plan
        owner = min(owners, key=_pull_order)
        more = owner.found_tokens - hit_tokens
        why = f"{plan.reason}; pulls {more} more tokens of the prefix from {owner.name}"
        return replace(plan, pull=owner, reason=why)

    def _loading(self, demand: Demand, plan: Plan, candidates: Sequence[Candidate]) -> Plan | None:
        """A decode worker alone, which loads what the plan's prefill worker would compute."""
        if plan.local:
            return None
        exclusions = demand.exclusions
        able = [
            c
            for c in candidates
            if c.loads
            and c.can_decode
            and c.info.role in ("decode", "both")
            and c.incarnation not in exclusions.workers | exclusions.decode
            and c.saved_tokens - plan.prefill.saved_tokens >= self._pull_tokens_min
            and demand.num_tokens - c.found_tokens <= self._decode_prefill_tokens_max
        ]
        if not able:
            return None
        best = min(able, key=lambda c: (-c.saved_tokens, c.decode_order))
        tiers = ", ".join(f"{n} blocks from {best.tier_name(tier)}" for tier, n in best.loads)
        return _local(best, f"it loads {tiers}")


def _choose(demand: Demand, candidates: Sequence[Candidate]) -> Plan:
    """Choose who prefills and who decodes, without a pull."""
    exclusions = demand.exclusions
    able = [c for c in candidates if c.can_prefill]
    fresh = [c for c in able if c.incarnation not in exclusions.workers]
    if not any(c.can_decode for c in fresh):
        fresh = able
    fitting = [c for c in fresh if c.can_decode]
    for candidate in fitting:
        if candidate.incarnation == exclusions.local_on and candidate.incarnation not in (
            exclusions.workers | exclusions.decode
        ):
            return _local(candidate, "no hand-over after one failed")
    if len(fresh) == 1:
        return _local(fresh[0], "the only worker that is ready and not at fault")
    prefills = [c for c in fresh if c.info.role in ("prefill", "both")]
    decodes = [c for c in fitting if c.info.role in ("decode", "both")]
    if not prefills or not decodes:
        missing = "decode" if prefills else "prefill"
        return _best_local(fitting, exclusions, f"no {missing} worker is ready")
    tokens = demand.num_tokens
    prefills = [c for c in prefills if tokens <= c.info.handover_tokens_max]
    decodes = [c for c in decodes if tokens <= c.info.handover_tokens_max]
    if not prefills or not decodes:
        return _best_local(fitting, exclusions, f"{tokens} tokens are too many to hand over")
    roomy = [c for c in decodes if c.incarnation not in exclusions.decode]
    if not roomy:
        return _best_local(fitting, exclusions, "no other decode worker has room")
    for prefill in sorted(prefills, key=lambda c: c.prefill_order):
        partners = [decode for decode in roomy if may_pair(demand, prefill, decode)]
        if partners:
            return _paired(prefill, min(partners, key=lambda c: c.decode_order))
    return _best_local(fitting, exclusions, "no two workers can hand over to each other now")


def _pull_order(c: Candidate) -> tuple[int, int, object]:
    return -c.saved_tokens, c.decode_load, c.incarnation


def _best_local(candidates: Sequence[Candidate], exclusions: Exclusions, why: str) -> Plan:
    roomy = [c for c in candidates if c.incarnation not in exclusions.decode] or candidates
    return _local(min(roomy, key=lambda c: c.prefill_order), why)


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


class PlainLocal:
    """As `Local`."""

    def __init__(self, options: PolicyOptions) -> None:
        pass

    def plan(self, demand: Demand, candidates: Sequence[Candidate]) -> Plan:
        """See `Policy.plan`."""
        fitting = [c for c in candidates if c.can_decode]
        exclusions = demand.exclusions
        fresh = [c for c in fitting if c.incarnation not in exclusions.workers] or fitting
        roomy = [c for c in fresh if c.incarnation not in exclusions.decode] or fresh
        worker = min(roomy, key=lambda c: (-c.saved_tokens, c.decode_load, c.incarnation))
        return Plan(
            worker,
            worker,
            f"local on {worker.name} (prefix {worker.found_tokens} tokens, "
            f"{worker.decode_load} requests there)",
        )


def may_pair(demand: Demand, one: Candidate, other: Candidate) -> bool:
    """Whether KV may move between them, by their contracts and by what has failed."""
    pair = frozenset((one.incarnation, other.incarnation))
    if len(pair) == 1:
        return True
    if pair in demand.exclusions.pairs:
        return False
    if one.incarnation in demand.bad_pairs.others(other.incarnation):
        return False
    return not one.info.contract.mismatches(other.info.contract)
