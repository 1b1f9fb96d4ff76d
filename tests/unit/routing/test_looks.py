"""However many workers report, those that wait are planned so often a second; none is forgotten."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, create_autospec

import pytest

from disagg.routing.looks import (
    FIRSTS_MAX,
    LOOK_MS,
    LOOK_MS_EACH,
    LOOKS_MAX,
    LOOKS_PER_S,
    SWEEPS_PER_S,
    Looks,
)
from disagg.routing.planner import Planner
from tests.unit.routing.builders import STATS, Router, request, worker
from tests.unit.routing.test_admission import Fleet

NUM_TENANTS = 3 * FIRSTS_MAX


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Mock:
    counted: Mock = create_autospec(Planner.plan_in_turn, side_effect=Planner.plan_in_turn)
    monkeypatch.setattr(Planner, "plan_in_turn", counted)
    return counted


def crowded() -> Fleet:
    """Decode workers have room, the only prefill worker has none; tenants wait for it."""
    fleet = Fleet("prefill", "decode", "decode", max_sequences=99, worker_prefill_tokens_max=5)
    fleet.ask("first", max_tokens=9)
    for number in range(NUM_TENANTS):
        fleet.ask(f"r{number}", tenant=f"t{number}")
    assert fleet.core.num_waiting == NUM_TENANTS
    return fleet


def report(fleet: Fleet, name: str, num_blocks_free: int = 50) -> None:
    stats = replace(STATS, num_running=1, num_blocks_free=num_blocks_free)
    fleet.did(fleet.core.from_worker(fleet.now_ms, fleet.infos[name].incarnation, stats))


def reports(fleet: Fleet, num: int, every_ms: int) -> None:
    """Of a large fleet: each is another one's, and each says something new."""
    for number in range(num):
        fleet.now_ms += every_ms
        report(fleet, f"w{number % 3}", num_blocks_free=50 + number % 7)


def test_reports_of_a_large_fleet_leave_the_router_its_time(plans: Mock) -> None:
    fleet = crowded()
    plans.reset_mock()
    reports(fleet, num=1000, every_ms=2)
    assert 10 < plans.call_count <= LOOKS_MAX + 2 * LOOKS_PER_S
    assert fleet.core.num_waiting == NUM_TENANTS


def test_who_is_first_goes_when_room_comes_however_many_reports_there_were() -> None:
    fleet = crowded()
    for number in range(LOOKS_MAX + FIRSTS_MAX + 5):
        fleet.now_ms += LOOK_MS if number % 8 == 0 else 0
        report(fleet, "w1", num_blocks_free=number % 7)
    fleet.core._admission._looks._plans._left = 0.0
    fleet.first("first")
    assert fleet.order == ["first", "r0"]


def test_all_are_served_in_their_turn_as_room_comes(plans: Mock) -> None:
    fleet = crowded()
    plans.reset_mock()
    served = 0
    while fleet.core.num_waiting:
        fleet.first(fleet.order[served])
        served += 1
        assert len(fleet.order) == served + 1, "each prompt that is computed lets the next in"
    assert fleet.order == ["first", *(f"r{n}" for n in range(NUM_TENANTS))]
    # One goes, and whose turn it is next is looked at for the first time.
    assert plans.call_count <= 2 * NUM_TENANTS + FIRSTS_MAX


def test_control_without_a_budget_each_report_costs_a_plan_per_tenant(
    plans: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Looks, "_budget_of", lambda *_: Mock())
    fleet = crowded()
    plans.reset_mock()
    reports(fleet, num=20, every_ms=2)
    assert plans.call_count == 20 * FIRSTS_MAX


def test_what_has_changed_otherwise_is_found_a_moment_later() -> None:
    """A worker takes another role: nobody came to have room, but somebody can go now."""
    fleet = crowded()
    fleet.did(fleet.core.register(fleet.now_ms, replace(fleet.infos["w1"], role="both")))
    for _ in range(40):
        fleet.now_ms += LOOK_MS
        report(fleet, "w2")
    assert "r0" in fleet.order


def test_a_worker_that_joins_is_used_at_once() -> None:
    fleet = crowded()
    new = fleet.infos["new"] = worker("new", "prefill", max_sequences=1)
    fleet.did(fleet.core.register(fleet.now_ms, new))
    fleet.did(fleet.core.session_up(fleet.now_ms, new.incarnation))
    report(fleet, "new")
    assert "r0" in fleet.order


def test_whoever_is_first_does_not_use_up_what_the_others_share() -> None:
    """Its revision has no room, and room comes and goes for another one's a thousand times."""
    looks = Looks()
    for name in ("first", "other"):
        looks.no_room(0, name)
    times: Counter[str] = Counter()
    for now_ms in range(1, 1001):
        looks.see(now_ms % 2, 0)
        for name in looks.due(now_ms, ("first", "other")):
            times[name] += 1
            looks.no_room(now_ms, name)
    assert LOOKS_PER_S <= times["first"] <= 2 * (LOOKS_PER_S + LOOKS_MAX)
    assert LOOKS_PER_S / 2 - 1 <= times["other"] <= LOOKS_PER_S + LOOKS_MAX


@pytest.mark.parametrize("changes_per_s", [10, 20, 60, 100])
def test_each_has_its_part_of_the_budget_however_much_comes(changes_per_s: int) -> None:
    """Those before the last one took all of it, while the worker that this one wants was idle."""
    looks, names = Looks(), [f"r{number}" for number in range(FIRSTS_MAX)]
    busy: Any = SimpleNamespace(num_prompts_queued=1, num_decoding=0, num_coming=0)
    plan: Any = SimpleNamespace(
        prefill=SimpleNamespace(worker=busy), decode=SimpleNamespace(worker=busy), hold_ms=1e6
    )
    seen_ms = {name: [0] for name in names}

    def look(now_ms: int, name: str) -> None:
        seen_ms[name].append(now_ms)
        if name == names[-1]:
            looks.no_room(now_ms, name)
        else:
            looks.hold(now_ms, cast(Any, SimpleNamespace(request_id=name)), plan)

    for name in names:
        look(0, name)
    for now_ms in range(1, 10_000, 2):
        busy.num_prompts_queued = now_ms * changes_per_s // 1000
        looks.see(1, 0)
        if looks.wanted(now_ms):
            for name in looks.due(now_ms, names):
                look(now_ms, name)
    gaps_ms = [b - a for times in seen_ms.values() for a, b in pairwise([*times, 10_000])]
    assert max(gaps_ms) <= LOOK_MS_EACH * FIRSTS_MAX + 1000 / SWEEPS_PER_S
    assert sum(map(len, seen_ms.values())) <= 10 * 2 * (LOOKS_PER_S + LOOKS_MAX)


@pytest.mark.parametrize("num_tenants", [FIRSTS_MAX - 1, FIRSTS_MAX, 3 * FIRSTS_MAX])
def test_however_many_wait_for_the_large_worker_others_go_where_there_is_room(
    num_tenants: int,
) -> None:
    large, small = worker("large", max_sequences=1), worker("small", max_model_tokens=40)
    router = Router(large, small, worker_waiting_max=0, requests_max=999)
    router.generate(request("first", 60, 30))
    for number in range(num_tenants):
        router.generate(request(f"r{number}", 60, tenant=f"t{number:02}"))
    router.generate(request("late", 10, tenant="zz"))
    for now_ms in range(5):
        if router.submits:
            break
        router.did(router.core.from_worker(now_ms, small.incarnation, STATS))
    assert [submit.key.request_id for _, submit in router.submits] == ["late"]


def test_within_a_tenant_what_waits_for_the_large_worker_holds_up_only_its_like() -> None:
    large = worker("large", max_sequences=1)
    small = worker("small", max_model_tokens=40, max_sequences=2)
    router = Router(large, small, worker_waiting_max=0, requests_max=999)
    for name, num_tokens in (("first", 60), ("long", 60), ("longer", 61)):
        router.generate(request(name, num_tokens, 30))
    for name in ("short", "next"):
        router.generate(request(name, 10))
        assert [submit.key.request_id for _, submit in router.submits] == [name]
    router.generate(request("last", 10))
    assert not router.submits
    assert router.core.num_waiting == 3
    router.did(router.core.cancel(0, "short", "left"))
    assert [submit.key.request_id for _, submit in router.submits] == ["last"]


def test_what_is_alike_is_told_anew_when_other_workers_come() -> None:
    router = Router(worker("large", max_sequences=1), worker_waiting_max=0)
    for name, num_tokens in (("first", 60), ("long", 60), ("short", 10)):
        router.generate(request(name, num_tokens, 30))
    small = worker("small", max_model_tokens=40)
    router.did(router.core.register(0, small))
    router.did(router.core.session_up(0, small.incarnation))
    router.did(router.core.from_worker(0, small.incarnation, STATS))
    assert [submit.key.request_id for _, submit in router.submits] == ["short"]


def test_who_computes_prompts_may_be_smaller_than_who_decodes() -> None:
    small, large = worker("ps", "prefill", max_model_tokens=40), worker("pl", "prefill")
    decode = worker("d", "decode")
    router = Router(small, large, decode, worker_prefill_tokens_max=5, requests_max=99)
    router.generate(request("first", 60, 30))
    router.generate(request("long", 60, 30))
    assert router.core.num_waiting == 1
    router.generate(request("short", 10, 80))
    assert ("ps", "short") in [(name, sub.key.request_id) for name, sub in router.submits]


def test_who_comes_or_goes_behind_others_is_no_news(plans: Mock) -> None:
    """With a thousand that wait a look at all firsts takes up to a millisecond."""
    fleet = crowded()
    looks = fleet.core._admission._looks
    report(fleet, "w1")
    assert not looks._has_news
    for number in range(50):
        fleet.ask(f"more{number}", tenant="t3")
        assert not looks._has_news
    fleet.core.cancel(fleet.now_ms, "more7", "left")
    assert not looks._has_news
    fleet.core.cancel(fleet.now_ms, "r3", "left")
    assert looks._has_news, "control: another one is first"
    fleet.ask("new", tenant="another")
    assert "more0" in looks._looks


def test_without_news_it_is_seen_only_so_often_whether_somebody_is_due() -> None:
    """As often as workers report, to whom nothing has come."""
    looks = Looks()
    seen = [now_ms for now_ms in range(1, 3001) if looks.wanted(now_ms)]
    assert len(seen) <= LOOKS_MAX + 3 * SWEEPS_PER_S
    assert len([now_ms for now_ms in seen if now_ms > 2000]) == SWEEPS_PER_S, "it goes on"
