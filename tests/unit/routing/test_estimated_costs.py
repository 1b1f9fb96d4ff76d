"""What a plan costs besides its own time: missed bounds, copies, those who have not come yet."""

from dataclasses import replace

import pytest

from disagg.messages.reports import PrefillReport
from disagg.messages.submit import Role
from disagg.routing.estimates.estimate import Estimate
from disagg.routing.exclusions import Exclusions
from disagg.routing.policy.appraisal import num_missed
from disagg.routing.policy.protocol import Demand
from disagg.routing.slo import Slo
from tests.unit.routing.builders import Router, request, worker
from tests.unit.routing.measured_fleet import D, P, fleet, say, served

FOUND = Estimate(
    queue_ms=10.0,
    room_ms=0.0,
    drain_ms=0.0,
    transfer_ms=0.0,
    prefill_ms=40.0,
    prefill_alone_ms=40.0,
    message_ms=0.0,
    handover_ms=0.0,
    tpot_ms=5.0,
    others_ms=0.0,
    num_made_late=0.0,
    stall_share=0.0,
    calm_tpot_ms=5.0,
    stalled_tpot_ms=5.0,
    stall_chance=0.0,
    num_bytes=0,
    num_answer_tokens=64,
)
A, B = (worker(name, "both", num_blocks=1000) for name in ("a", "b"))


def test_a_time_per_token_that_all_should_keep_moves_prompts_away() -> None:
    for bound_ms, who in ((0.0, {"d"}), (7.0, {"p", "d"})):
        router = fleet(P, D, slo_tpot_ms=bound_ms, others_weight=0.0, link_ms=150)
        say(router, D, num_running=8)
        assert set(served(router)) == who, bound_ms


def test_an_answer_with_an_own_bound_is_spared_by_how_far_it_is() -> None:
    def goes_to(max_tokens: int, bound_ms: float) -> str:
        router = fleet(A, B, others_weight=0.0)
        short = request("short", num_tokens=3, max_tokens=max_tokens)
        router.generate(replace(short, slo=Slo(tpot_ms=bound_ms)))
        assert [who for who, _ in router.submits] == ["a"]
        for one in (A, B):  # as far as they say nothing goes on there
            say(router, one)
        (who,) = served(router)
        return who

    assert goes_to(10, 5.0) == "b", "40 ms for nine tokens, which take 2 ms each"
    assert goes_to(10, 0.0) == "a", "it has no bound"
    assert goes_to(90, 5.0) == "a", "the same for as many tokens as answers have"
    assert goes_to(10, 1.0) == "a", "it is late anyway"


def test_a_bound_on_the_first_token_counts_beside_the_sum() -> None:
    for ttft_ms, who in ((0, {"p", "d"}), (40, {"d"}), (400, {"p", "d"})):
        router = fleet(P, D)
        say(router, P, num_prefill_tokens_queued=200, num_waiting=1)
        say(router, D, num_running=3)
        found = served(router, num_tokens=201, slo=Slo(ttft_ms=ttft_ms))
        assert set(found) == who, ttft_ms


def test_who_comes_too_late_by_every_plan_leaves_no_worker_idle() -> None:
    """Neighbours count by its own bound: who has no time left does not wait for their sake."""
    for bound_ms, who in ((10, {"d"}), (0, {"p", "d"}), (60_000, set[str]())):
        router = fleet(P, D, slo_tpot_ms=7.0, others_weight=0.0, link_ms=150)
        say(router, D, num_running=8)
        assert set(served(router, slo=Slo(ttft_ms=bound_ms))) == who, bound_ms


def test_of_those_behind_it_more_are_late_the_less_time_it_has_left_itself() -> None:
    demand = Demand(401, 501, Exclusions(), slo=Slo(ttft_ms=1_000), num_behind=8)
    for waited_ms, num in ((0, 0), (450, 0), (700, 4), (2_000, 9)):
        late = replace(demand, waited_ms=waited_ms)
        assert num_missed(FOUND, late) == num, waited_ms
        alone = replace(late, num_behind=0)
        assert num_missed(FOUND, alone) == (waited_ms > 950), waited_ms
    for waited_ms, part in ((750, 0.0), (950, 0.5), (1_050, 0.75), (1_150, 1.0)):
        near = replace(demand, waited_ms=waited_ms, num_behind=0)
        assert num_missed(FOUND, near) == pytest.approx(part), "an estimate may be wrong"
    assert num_missed(FOUND, replace(demand, slo=Slo())) == 0, "without a bound nobody is late"


def test_a_copy_has_a_price_where_caches_are_of_use() -> None:
    """A hand-over leaves a second copy, which pushes out what later prompts would have found."""
    for share, who in ((0.0, {"p", "d"}), (1.0, {"d"})):
        router = fleet(P, D, link_ms=20)
        finds(router, share)
        say(router, P)
        say(router, D, num_prefill_tokens_queued=150, num_waiting=1)
        assert set(served(router)) == who, share


def finds(router: Router, share: float) -> None:
    """Prompts have that share of their tokens in caches; those that say so have ended."""
    for number in range(30):
        name = f"found-{number}"
        router.now_ms += 1_000
        router.generate(request(name, num_tokens=10, max_tokens=1))
        ((who, submit),) = (one for one in router.submits if one[1].role is not Role.DECODE)
        num_found = int(share * 10)
        report = PrefillReport(submit.key, 10, num_found, 10 - num_found)
        router.core.from_worker(router.now_ms, worker(who).incarnation, report)
        router.core.cancel(router.now_ms, name, "known")


def test_a_long_prompt_leaves_a_worker_free_for_the_short_ones_that_come() -> None:
    """Behind another long one it waits; on the free worker it would make all of them wait."""
    for num_short, who in ((0, {"a"}), (12, {"b"})):
        router = fleet(A, B)
        for number in range(num_short):
            router.now_ms += 50
            short = replace(request(f"s{number}", num_tokens=11), slo=Slo(ttft_ms=100))
            router.generate(short)
            router.core.cancel(router.now_ms, f"s{number}", "over")
        say(router, A)
        say(router, B, num_prefill_tokens_queued=300, num_prompts_queued=1)
        found = served(router, slo=Slo(ttft_ms=10_000))
        assert {who for who, one in found.items() if one.role is not Role.DECODE} == who, num_short
