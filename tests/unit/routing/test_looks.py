"""However many workers report, those that wait are planned so often a second; none is forgotten."""

from collections import Counter
from dataclasses import replace
from unittest.mock import Mock, create_autospec

import pytest

from disagg.routing.admission import HEADS_MAX
from disagg.routing.looks import LOOK_MS, LOOKS_MAX, LOOKS_PER_S, Looks
from disagg.routing.planner import Planner
from tests.unit.routing.builders import STATS, worker
from tests.unit.routing.test_admission import Fleet

NUM_TENANTS = 3 * HEADS_MAX


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
    for number in range(LOOKS_MAX + HEADS_MAX + 5):
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
    assert plans.call_count <= 2 * NUM_TENANTS + HEADS_MAX


def test_control_without_a_budget_each_report_costs_a_plan_per_tenant(
    plans: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Looks, "_is_due", lambda *_: True)
    fleet = crowded()
    plans.reset_mock()
    reports(fleet, num=20, every_ms=2)
    assert plans.call_count == 20 * HEADS_MAX


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
    assert times["first"] >= 500
    assert 200 <= times["other"] <= LOOKS_PER_S + LOOKS_MAX
