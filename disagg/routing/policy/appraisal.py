"""Plans with what they are expected to take: from workers and what they hold to an `Estimate`."""

from dataclasses import replace

from disagg.messages.registration import WorkerInfo
from disagg.routing.estimates.considered import Considered
from disagg.routing.estimates.estimate import Estimate, LinkCost, Move, Place, Work, estimate
from disagg.routing.estimates.kv_bytes import handover_bytes, pull_bytes
from disagg.routing.estimates.speeds import Speeds
from disagg.routing.policy.protocol import Candidate, Demand, Plan

NO_LINK = LinkCost(0.0, 0.0)
SURE_SHARE = 0.5
"""Who comes after a request has less time left than it. If its own first token is expected within
this share of its bound theirs are in time; from there on the fewer of them, the later it is."""


def appraise(plan: Plan, demand: Demand, speeds: Speeds, slo_tpot_ms: float = 0.0) -> Plan:
    """The same plan with its estimate, as far as enough was measured.

    Args:
        plan: whose workers may be anywhere.
        demand: what is planned.
        speeds: what was measured.
        slo_tpot_ms: what everybody's time per token should stay below; 0: any.
    """
    found = _estimate(plan, demand, speeds)
    if found is None:
        return plan
    return replace(plan, estimate=found, num_slos_missed=num_missed(found, demand, slo_tpot_ms))


def considered(plan: Plan, *, chosen: bool = False) -> Considered:
    """A plan as it is shown afterwards."""
    return Considered(
        prefill=plan.prefill.name,
        decode=plan.decode.name,
        pull=plan.pull.name if plan.pull is not None else "",
        found_tokens=plan.found_tokens,
        estimate=plan.estimate,
        num_slos_missed=plan.num_slos_missed,
        chosen=chosen,
    )


def num_missed(found: Estimate, demand: Demand, slo_tpot_ms: float) -> int:
    """How many miss a bound: itself, of those that wait behind it some, and its neighbours."""
    slo = demand.slo
    used = (demand.waited_ms + found.ttft_ms) / slo.ttft_ms if slo.ttft_ms else 0.0
    own = used > 1 or (bool(slo.tpot_ms) and found.mean_tpot_ms > slo.tpot_ms)
    late = min(1.0, max(0.0, (used - SURE_SHARE) / (1 - SURE_SHARE)))
    others = found.num_slower(slo_tpot_ms) if slo_tpot_ms else 0
    return own + round(demand.num_behind * late) + others


def _estimate(plan: Plan, demand: Demand, speeds: Speeds) -> Estimate | None:
    prefill = speeds.place(plan.prefill.worker)
    if prefill is None:
        return None
    decode = prefill if plan.local else speeds.place(plan.decode.worker)
    if decode is None:
        return None
    num_found = min(plan.found_tokens, demand.num_tokens - 1)
    pull = handover = None
    load_ms = plan.prefill.load_ms if plan.pull is None else plan.pull.load_ms
    if plan.pull is not None:
        pull = _pull(plan.pull, plan.prefill, num_found, speeds)
        if pull is None:
            return None
    if not plan.local:
        handover = _handover(plan, demand, prefill, num_found, speeds)
        if handover is None:
            return None
    work = Work(
        num_tokens=demand.num_tokens,
        num_found=num_found,
        num_answer_tokens=demand.num_answer_tokens,
        spread_tokens=speeds.answer_tokens,
        load_ms=load_ms,
        pull=pull,
        handover=handover,
        reserve_ms=speeds.reserve_ms,
        message_ms=speeds.message_ms,
        commit_ms=speeds.commit_ms,
        num_behind=demand.num_behind,
    )
    return estimate(work, prefill, decode)


def _pull(owner: Candidate, reader: Candidate, num_tokens: int, speeds: Speeds) -> Move | None:
    num_bytes = pull_bytes(reader.info, num_tokens, reader.usable_tokens)
    return _move(owner.info, reader.info, num_bytes, num_bytes, speeds)


def _handover(
    plan: Plan, demand: Demand, prefill: Place, num_found: int, speeds: Speeds
) -> Move | None:
    num_computed = demand.num_tokens - num_found
    num_at_end = num_computed
    if prefill.step_tokens_max:
        num_at_end = 1 + (num_computed - 1) % prefill.step_tokens_max
    reader = plan.decode
    num_held = reader.always_visible_tokens
    num_bytes, at_end = handover_bytes(reader.info, demand.num_tokens, num_held, num_at_end)
    return _move(plan.prefill.info, reader.info, num_bytes, at_end, speeds)


def _move(
    owner: WorkerInfo, reader: WorkerInfo, num_bytes: int, at_end: int, speeds: Speeds
) -> Move | None:
    link = speeds.link_cost(owner.incarnation, reader.incarnation)
    if link is None:
        if num_bytes:
            return None
        link = NO_LINK
    return Move(num_bytes, at_end, link)
