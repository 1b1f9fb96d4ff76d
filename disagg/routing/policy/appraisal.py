"""Plans with what they are expected to take: from workers and what they hold to an `Estimate`."""

from collections.abc import Iterable
from functools import partial
from math import inf

from disagg.messages.identity import Incarnation
from disagg.messages.lazy import cached_property
from disagg.messages.registration import WorkerInfo
from disagg.routing.estimates.arrivals import Newcomers
from disagg.routing.estimates.considered import Considered
from disagg.routing.estimates.estimate import Estimate, Move, Work, estimate
from disagg.routing.estimates.kv_bytes import handover_bytes, num_blocks_of, pull_bytes, tokens_of
from disagg.routing.estimates.place import LinkCost, Place
from disagg.routing.estimates.speeds import Speeds
from disagg.routing.policy.protocol import Candidate, Demand, Plan
from disagg.routing.slo import missed, part

NO_LINK = LinkCost(0.0, 0.0)
SURE_SHARE = 0.5
"""Who comes after a request has less time left than it. If its own first token is expected within
this share of its bound theirs are in time; from there on the fewer of them, the later it is."""
MISS_SHARE = 0.5
"""Of a request's bound, or of what it takes where it has none. An SLO kept is worth some of the
time that is spent for it, not any: else workers compute for one what others then come too late for.
"""


class Appraiser:
    """Estimates the plans of one request, as far as enough was measured.

    Args:
        demand: what is planned.
        speeds: what was measured.
        slo_tpot_ms: bound for the time per token of who has no own one; 0: none.
    """

    def __init__(self, demand: Demand, speeds: Speeds, slo_tpot_ms: float = 0.0) -> None:
        self._demand = demand
        self._speeds = speeds
        self._slo_tpot_ms = slo_tpot_ms
        self._places: dict[Incarnation, Place | None] = {}
        self._blocks: dict[tuple[Incarnation, int], int] = {}
        self._queues: list[tuple[Incarnation, float]] = []

    def think_of_newcomers(self, shortest: Iterable[Candidate]) -> None:
        """From now on plans cost those who come later; two with the shortest queues are enough."""
        places = ((one.incarnation, self._place(one)) for one in shortest)
        self._queues = [(who, place.drain_ms) for who, place in places if place is not None]

    def appraise(self, plan: Plan) -> Plan:
        """The same plan, whose workers may be anywhere, with its estimate."""
        found = self._estimate(plan)
        if found is None:
            return plan
        slo, slo_tpot_ms = self._demand.slo, self._slo_tpot_ms
        num = num_missed(found, self._demand)
        answer_ms = self._demand.num_answer_tokens * (slo.tpot_ms or slo_tpot_ms)
        missed_ms = MISS_SHARE * (slo.ttft_ms or answer_ms or found.own_ms) * num
        return plan.estimated(found, num, missed_ms)

    def _place(self, candidate: Candidate) -> Place | None:
        who = candidate.incarnation
        if who not in self._places:
            self._places[who] = self._speeds.place(candidate.worker)
        return self._places[who]

    def _estimate(self, plan: Plan) -> Estimate | None:
        demand = self._demand
        prefill = self._place(plan.prefill)
        decode = prefill if plan.local else self._place(plan.decode)
        if prefill is None or decode is None:
            return None
        num_found = min(plan.found_tokens, demand.num_tokens - 1)
        pull = handover = None
        load_ms = plan.prefill.load_ms if plan.pull is None else plan.pull.load_ms
        if plan.pull is not None:
            pull = self._pull(plan.pull, plan.prefill, num_found)
            if pull is None:
                return None
        if not plan.local:
            handover = self._handover(plan, prefill, num_found)
            if handover is None:
                return None
        others_free_ms = self._others_free_ms(plan.prefill)
        newcomers_per_ms = 0.0
        if others_free_ms:  # or there is room for whoever comes
            compute_ms = prefill.prefill_ms(demand.num_tokens - num_found, num_found)
            newcomers_per_ms = self._newcomers.shorter_per_ms(compute_ms)
        work = self._work_of_any(
            num_found=num_found,
            load_ms=load_ms,
            pull=pull,
            handover=handover,
            num_held=min(plan.prefill.found_tokens, num_found),
            newcomers_per_ms=newcomers_per_ms,
            others_free_ms=others_free_ms,
            handed_tokens=tokens_of(plan.decode.info, handover.num_bytes) if handover else 0.0,
            num_blocks=self._num_blocks(plan.prefill, plan.prefill.found_tokens),
            num_blocks_handed=self._num_blocks(plan.decode, plan.decode.always_visible_tokens)
            if handover
            else 0,
            block_bytes=plan.prefill.info.contract.block_bytes,
        )
        found = estimate(work, prefill, decode)
        return found if found.is_finite else None

    @cached_property
    def _work_of_any(self) -> partial[Work]:
        """What is the same in every plan of the request."""
        demand, speeds = self._demand, self._speeds
        return partial(
            Work,
            num_tokens=demand.num_tokens,
            num_answer_tokens=demand.num_answer_tokens,
            spread_tokens=speeds.answer_tokens,
            reserve_ms=speeds.reserve_ms,
            message_ms=speeds.message_ms,
            pull_ms=speeds.pull_ms,
            commit_ms=speeds.commit_ms,
            num_behind=demand.num_behind,
            found_share=speeds.found_share,
            slo_tpot_ms=self._slo_tpot_ms,
        )

    @cached_property
    def _newcomers(self) -> Newcomers:
        return self._speeds.newcomers(self._demand.slo.ttft_ms)

    def _others_free_ms(self, prefill: Candidate) -> float:
        if not self._queues:
            return 0.0
        return min([ms for who, ms in self._queues if who != prefill.incarnation], default=inf)

    def _num_blocks(self, where: Candidate, num_held: int) -> int:
        """Of the prompt, beside those of the tokens that it holds."""
        key = where.incarnation, num_held
        if key not in self._blocks:
            self._blocks[key] = num_blocks_of(where.info, self._demand.num_tokens, num_held)
        return self._blocks[key]

    def _pull(self, owner: Candidate, reader: Candidate, num_tokens: int) -> Move | None:
        num_bytes = pull_bytes(reader.info, num_tokens, reader.usable_tokens)
        return self._move(owner.info, reader.info, num_bytes, num_bytes)

    def _handover(self, plan: Plan, prefill: Place, num_found: int) -> Move | None:
        num_tokens = self._demand.num_tokens
        num_at_end = num_computed = num_tokens - num_found
        if prefill.step_tokens_max:
            num_at_end = 1 + (num_computed - 1) % prefill.step_tokens_max
        reader = plan.decode
        num_held = reader.always_visible_tokens
        num_bytes, at_end = handover_bytes(reader.info, num_tokens, num_held, num_at_end)
        return self._move(plan.prefill.info, reader.info, num_bytes, at_end)

    def _move(
        self, owner: WorkerInfo, reader: WorkerInfo, num_bytes: int, at_end: int
    ) -> Move | None:
        link = self._speeds.link_cost(owner.incarnation, reader.incarnation)
        if link is None:
            if num_bytes:
                return None
            link = NO_LINK
        return Move(num_bytes, at_end, link)


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


def num_missed(found: Estimate, demand: Demand) -> float:
    """How many miss a bound: itself, of those that wait behind it some, and those beside it."""
    slo = demand.slo
    own = behind = 0.0
    if slo.ttft_ms:
        used = (demand.waited_ms + found.ttft_ms) / slo.ttft_ms
        own, behind = missed(used), demand.num_behind * part(used, SURE_SHARE, 1.0)
    if slo.tpot_ms:
        own = max(own, found.tpot_missed(slo.tpot_ms))
    return own + behind + found.num_made_late
