"""Who waits at the router although there is room holds up nobody, nor the router itself."""

from dataclasses import replace
from unittest.mock import Mock, create_autospec

import pytest

from disagg.messages.registration import WorkerInfo
from disagg.routing.looks import FIRSTS_MAX, LOOK_MS, SEEN_MAX, Looks
from disagg.routing.planner import Planner
from disagg.routing.slo import Slo
from tests.unit.routing.builders import Router, request, worker
from tests.unit.routing.measured import ALL_STEPS, stats
from tests.unit.routing.measured_fleet import fleet, say

ALONE = worker("alone", "both", num_blocks=1000)
EACH = 3_000
"""Tokens of each prompt that is queued at the worker."""


def queued(router: Router, num: int, who: WorkerInfo = ALONE) -> None:
    """A worker says that it has so many prompts to compute."""
    report = stats(ALL_STEPS, num_prefill_tokens_queued=num * EACH, num_prompts_queued=num)
    router.did(router.core.from_worker(router.now_ms, who.incarnation, report))


def ask(router: Router, name: str, num_tokens: int, tenant: str = "") -> bool:
    """Whether it went to a worker at once."""
    router.generate(request(name, num_tokens=num_tokens, max_tokens=64, tenant=tenant))
    return name in went(router)


def went(router: Router) -> list[str]:
    return [submit.key.request_id for _, submit in router.submits]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the plans of those that wait; each takes up to a millisecond."""
    counted: Mock = create_autospec(Planner.plan_in_turn, side_effect=Planner.plan_in_turn)
    monkeypatch.setattr(Planner, "plan_in_turn", counted)
    return counted


@pytest.mark.parametrize("num_tenants", [FIRSTS_MAX - 1, FIRSTS_MAX, 2 * FIRSTS_MAX])
def test_tenants_who_wait_by_choice_do_not_hold_others_up(num_tenants: int) -> None:
    router = fleet(ALONE, requests_max=100)
    queued(router, 3)
    for number in range(num_tenants):
        assert not ask(router, f"long-{number}", 401, f"tenant-{number}")
    assert ask(router, "short", 3, "another")
    assert router.core.num_waiting == num_tenants


@pytest.mark.parametrize("tenant", ["", "another"])
def test_each_goes_as_soon_as_its_own_reason_is_gone(tenant: str) -> None:
    """A shorter prompt overtakes what is queued, so its wait is soon shorter than a long one's."""
    router, control = fleet(ALONE), fleet(ALONE)
    queued(router, 6)
    assert not ask(router, "long", 401)
    assert not ask(router, "next", 130, tenant)
    assert not ask(router, "last", 130, tenant)
    router.now_ms = 100
    queued(router, 4)
    queued(control, 4)
    assert ask(control, "next", 130), "alone it goes"
    assert not ask(control, "long", 401), "control: that one had better wait"
    assert went(router) == ["next", "last"]
    assert router.core.num_waiting == 1


def test_many_who_wait_by_choice_are_each_looked_at_again() -> None:
    router = fleet(ALONE, requests_max=100)
    queued(router, 6)
    for number in range(40):
        assert not ask(router, f"long-{number}", 401)
    assert not ask(router, "short", 130)
    for _ in range(20):
        router.now_ms += 100
        queued(router, 4)
        if went(router):
            assert went(router) == ["short"]
            return
    pytest.fail("it was not looked at again")


def test_a_long_line_is_not_looked_at_in_one_turn(plans: Mock) -> None:
    """Each plan takes up to a millisecond, in which every token stream stands still."""
    router = fleet(ALONE, requests_max=300, worker_prefill_tokens_max=400)
    assert ask(router, "first", 450)
    for number in range(200):
        assert not ask(router, f"long-{number}", 401)
    say(router, ALONE, num_prefill_tokens_queued=3 * EACH, num_prompts_queued=3)
    plans.reset_mock()
    router.core.cancel(router.now_ms, "first", "it makes room, but all had better wait")
    assert FIRSTS_MAX <= plans.call_count <= 8 * FIRSTS_MAX
    assert router.core.num_waiting == 200
    for _ in range(200 // FIRSTS_MAX + 1):
        plans.reset_mock()
        router.did(router.core.tick(router.now_ms))
        assert plans.call_count <= 8 * FIRSTS_MAX
    assert len(router.core._admission._looks._held) == 200, "all were looked at"
    queued(router, 0)
    assert went(router) == ["long-0"], "control: they go in their order, as far as there is room"


def test_who_waits_by_choice_is_planned_again_when_its_workers_have_moved(plans: Mock) -> None:
    router = fleet(ALONE)
    queued(router, 6)
    assert not ask(router, "long", 401)
    plans.reset_mock()
    for _ in range(10):  # steps of decodes, as far as the router knows
        router.now_ms += 1
        queued(router, 6)
    assert plans.call_count == 0
    queued(router, 5)
    assert plans.call_count == 1, "control: a prompt is done"
    say(router, ALONE, num_prefill_tokens_queued=5 * EACH - 1, num_prompts_queued=5)
    assert plans.call_count == 1, "a step of the next one"
    router.now_ms += LOOK_MS
    queued(router, 5)
    assert plans.call_count == 2, "others may be better by now"


def test_of_a_long_line_a_few_are_looked_at_with_each_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = fleet(ALONE, requests_max=300)
    queued(router, 6)
    for number in range(10 * SEEN_MAX):
        assert not ask(router, f"long-{number}", 401)
    looks = create_autospec(Looks._budget_of, side_effect=Looks._budget_of)
    monkeypatch.setattr(Looks, "_budget_of", looks)
    router.now_ms += 1
    queued(router, 6)
    assert 0 < looks.call_count <= FIRSTS_MAX + SEEN_MAX
    seen = {one.args[2] for one in looks.call_args_list}
    queued(router, 6)
    assert {one.args[2] for one in looks.call_args_list} > seen, "then others"


@pytest.mark.parametrize("waits", [False, True])
def test_answers_go_where_no_long_prompt_waits_to_go(waits: bool) -> None:
    one, other = (worker(name, "both", num_blocks=1000) for name in ("one", "other"))
    router = fleet(one, other, others_weight=0.0, slo_tpot_ms=7.0)
    for who in (one, other):
        say(router, who, num_running=8)
    long = request("long", num_tokens=401, max_tokens=100)
    router.generate(replace(long, slo=Slo(ttft_ms=60_000)))
    assert not went(router), "the answers there would come late"
    if not waits:
        router.core.cancel(router.now_ms, "long", "control")
    short = request("short", num_tokens=3, max_tokens=10)
    router.generate(replace(short, slo=Slo(tpot_ms=7.0)))
    assert went(router) == ["short"]
    assert [who for who, _ in router.submits] == ["other" if waits else "one"]
