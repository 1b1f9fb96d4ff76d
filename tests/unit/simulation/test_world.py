"""Fleets in virtual time: every request ends, times are those of the curves, seeds repeat."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mean

import pytest

from disagg.errors import ExpiredError, InvariantViolation
from disagg.messages.identity import Incarnation
from disagg.messages.session import ToRouterMessage
from disagg.messages.stats import WorkerStats
from disagg.routing import fleet as routing_fleet
from disagg.routing.estimates.place import LinkCost
from disagg.routing.policy.registry import POLICIES
from disagg.simulation import world as simulated_world
from disagg.simulation.curves import Line, Surface
from disagg.simulation.fleet_plan import FleetPlan
from disagg.simulation.mixes import Lengths, make_trace
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.worker import SimulatedWorker
from disagg.simulation.world import Outcome, World
from tests.unit.simulation.fleets import fleet, with_curves, with_routers

ROOT = Path(__file__).parents[3]
LENGTHS = Lengths(4_096, 0.1)


def alone(plan: FleetPlan, num_prompt: int, num_answer: int) -> Outcome:
    ids = tuple(range(-(-num_prompt // 512)))
    (outcome,) = World(plan).run([TraceRequest(0, num_prompt, num_answer, ids)])
    return outcome


def test_a_request_alone_takes_what_the_curves_say() -> None:
    outcome = alone(fleet(), 500, 5)
    # 3 ms of HTTP, messages: submit, reservation there and back, the token; a step of 500 tokens.
    step = fleet().curves.prefill.at(500, 0)
    assert outcome.ttft_ms == pytest.approx(3 + 4 * 0.5 + step, abs=0.01)
    assert (outcome.planned, outcome.handed_over) == (True, True)
    assert outcome.num_tokens == 5
    # Before the second token the rest is read and committed; four steps follow.
    assert outcome.tpot_ms is not None
    decode = fleet().curves.decode.at(1, 502)
    assert decode < outcome.tpot_ms < decode + 5


def test_a_prompt_in_chunks() -> None:
    one, three = alone(fleet(), 512, 1), alone(fleet(), 1_500, 1)
    assert one.ttft_ms is not None
    assert three.ttft_ms is not None
    prompt_ms = fleet().curves.prompt_ms
    more_ms = prompt_ms(1_500, 512) - prompt_ms(512, 512)
    assert three.ttft_ms - one.ttft_ms == pytest.approx(more_ms, abs=1)


def test_a_prefix_that_is_cached_is_not_computed() -> None:
    first = TraceRequest(0, 1_024, 2, (0, 1))
    again = TraceRequest(5_000, 1_100, 2, (0, 1, 2))
    other = TraceRequest(10_000, 1_100, 2, (7, 8, 9))
    outcomes = World(fleet()).run([first, again, other])
    assert [one.num_cached for one in outcomes] == [0, 1_024, 0]
    times = [one.ttft_ms or 0 for one in outcomes]
    assert times[1] < times[0] / 2 < times[2]


@pytest.mark.parametrize("num_routers", [1, 3])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_ends(policy: str, num_routers: int) -> None:
    """More than the fleet can take at once, with conversations that go on; `World.run` also holds
    every worker to its invariants, and to hold nothing at the end."""
    trace = make_trace("shifting", 12, 8, LENGTHS, seed=3)
    plan = with_routers(fleet(2, 2, policy), num_routers)
    world = World(plan, seed=1)
    outcomes = world.run(trace)
    assert all(one.finished for one in outcomes)
    assert [one.num_tokens for one in outcomes] == [one.num_answer for one in trace]
    assert all(one.ttft_ms is not None and one.ttft_ms > 0 for one in outcomes)
    assert world.routers.num_live == 0


def mean_ttft_ms(num_routers: int) -> float:
    """Of documents that come to all routers at once; there are more workers than documents."""
    trace = [TraceRequest(0, 4_000, 2, (number,)) for number in range(8)]
    plan = with_routers(replace(fleet(0, 0), num_both=16), num_routers)
    return mean(one.ttft_ms or inf for one in World(plan).run(trace))


def test_routers_that_see_the_same_choose_different_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: with one order of workers for all of them the first worker gets everything."""
    alone, apart = mean_ttft_ms(1), mean_ttft_ms(8)
    monkeypatch.setattr(routing_fleet, "turn_of", lambda router_id, worker_id: b"")
    together = mean_ttft_ms(8)
    assert alone < apart < 2 * alone
    assert together > 3 * alone


def test_refused_requests_end_too() -> None:
    plan = fleet()
    plan = replace(plan, router=replace(plan.router, requests_max=3))
    trace = [TraceRequest(0, 400, 20, (number,)) for number in range(10)]
    errors = [one.error for one in World(plan).run(trace)]
    assert errors.count("") == 3
    assert set(errors) == {"", "rate_limit_exceeded"}


def test_what_no_worker_holds_is_refused() -> None:
    outcome = alone(fleet(), 8_192, 1)
    assert outcome.error == "context_length_exceeded"


def test_the_same_seed_brings_the_same() -> None:
    """In other processes too, where strings hash to other numbers."""
    script = (
        "from tests.unit.simulation.test_world import times;print(times(5) == times(5), times(5))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert runs.pop().startswith("True")
    assert times(5) != times(6)


def times(seed: int) -> list[tuple[float | None, float | None]]:
    trace = make_trace("multi-turn", 10, 4, LENGTHS, seed)
    outcomes = World(fleet(2, 2, "estimated"), seed).run(trace)
    return [(one.first_ms, one.end_ms) for one in outcomes]


def test_a_policy_that_hands_over_and_one_that_does_not() -> None:
    trace = make_trace("short-chat", 4, 5, LENGTHS, seed=0)
    shares = {
        policy: sum(one.handed_over for one in World(fleet(1, 1, policy)).run(trace))
        for policy in ("prefix_then_load", "local")
    }
    assert shares == {"prefix_then_load": len(trace), "local": 0}


def test_a_fleet_that_gets_long_prompts_only_measures_its_links() -> None:
    """Their READs begin while they are computed, and wait for it in between."""
    plan = fleet(policy="estimated")
    assert plan.limits.max_step_tokens < 1_000
    trace = make_trace("long-documents", 1.0, 20.0, LENGTHS, 0)
    outcomes = World(plan).run(trace)
    kinds = {outcome.handed_over for outcome in outcomes[len(outcomes) // 2 :]}
    assert kinds == {True, False}, "estimates are there: else all are handed over"


def test_local_prompts_hold_decodes_up_and_handed_over_ones_do_not() -> None:
    """What hand-overs are for, as a simulation must show it."""
    streams = [TraceRequest(0, 100, 200, (number,)) for number in range(4)]
    ids = iter(range(100, 10_000))
    long = [
        TraceRequest(500 + 150 * number, 3_000, 2, tuple(next(ids) for _ in range(6)))
        for number in range(10)
    ]
    worst = {}
    for policy in ("prefix_then_load", "local"):
        outcomes = World(fleet(1, 1, policy)).run([*streams, *long])
        worst[policy] = max(one.tpot_ms or 0 for one in outcomes[:4])
    assert worst["local"] > 1.5 * worst["prefix_then_load"]


def test_controls_wrong_curves_predict_something_else() -> None:
    """The figures come from the curves: each of them, wrong, shows in what it is about."""
    right = alone(fleet(), 3_000, 20)
    assert right.ttft_ms is not None
    assert right.tpot_ms is not None
    curves = fleet().curves

    def slower(surface: Surface) -> Surface:
        return replace(surface, ms=tuple(tuple(2 * ms for ms in row) for row in surface.ms))

    slow_prefill = alone(with_curves(fleet(), prefill=slower(curves.prefill)), 3_000, 20)
    assert (slow_prefill.ttft_ms or 0) > 1.8 * right.ttft_ms
    slow_decode = alone(with_curves(fleet(), decode=slower(curves.decode)), 3_000, 20)
    assert (slow_decode.tpot_ms or 0) > 1.8 * right.tpot_ms
    assert slow_decode.ttft_ms == right.ttft_ms
    slow_link = alone(with_curves(fleet(), link=LinkCost(1.0, 500.0)), 3_000, 20)
    assert slow_link.ttft_ms == right.ttft_ms
    assert (slow_link.tpot_ms or 0) > 1.15 * right.tpot_ms


def test_reads_share_the_wires_of_both_ends() -> None:
    """Two hand-overs to one decode worker take turns."""
    plan = with_curves(fleet(2, 1), link=LinkCost(0.0, 400.0))
    together = World(plan).run([TraceRequest(0, 500, 2, (n,)) for n in range(2)])
    single = alone(plan, 500, 2)
    later = sorted(one.tpot_ms or 0 for one in together)
    assert later[1] - later[0] > 0.4 * (single.tpot_ms or 0)


def test_a_worker_that_forgets_to_give_back_is_found() -> None:
    """The control of the check at the end."""
    world = World(fleet())
    worker = world.workers[0]
    pool = worker.core.kv.pool
    pool.hold("forgotten", pool.allocate(1))
    with pytest.raises(InvariantViolation):
        world.run([TraceRequest(0, 100, 2, (0,))])


def test_steps_are_longer_beside_workers_of_the_same_host() -> None:
    """A prompt beside a stream of another worker; hosts of one worker share nothing."""
    stream = TraceRequest(0, 64, 200, (1,))
    later = TraceRequest(1_000, 500, 2, (2,))

    def ttft_ms(share: float, workers_per_host: int) -> float:
        plan = with_curves(fleet(), beside=Line((0,), (share,)), workers_per_host=workers_per_host)
        return World(plan).run([stream, later])[1].ttft_ms or 0

    step = fleet().curves.prefill.at(500, 0)
    assert ttft_ms(0.5, 2) - ttft_ms(0, 2) == pytest.approx(0.5 * step, abs=0.01)
    assert ttft_ms(0.5, 1) == ttft_ms(0, 1), "control: a host for each"
    plan = with_curves(fleet(), beside=Line((0,), (0.5,)), workers_per_host=2)
    assert alone(plan, 500, 2).ttft_ms == alone(fleet(), 500, 2).ttft_ms, "nobody else computes"


def test_steps_are_longer_beside_others_by_their_tokens() -> None:
    """Here short steps suffer, and long ones do not; then the other way round."""
    stream = TraceRequest(0, 64, 60, (1,))
    later = TraceRequest(200, 2_000, 2, (2, 3, 4, 5))

    def times_ms(*shares: float) -> tuple[float, float]:
        plan = with_curves(fleet(), beside=Line((1, 512), shares), workers_per_host=2)
        first, second = World(plan).run([stream, later])
        return first.tpot_ms or 0, second.ttft_ms or 0

    tpot_ms, ttft_ms = times_ms(0, 0)
    slow_decode, slow_prefill = times_ms(0.5, 0), times_ms(0, 0.5)
    assert slow_decode[0] > 1.05 * tpot_ms
    assert slow_decode[1] < 1.05 * ttft_ms
    assert slow_prefill[0] == pytest.approx(tpot_ms, rel=0.01)
    assert slow_prefill[1] > 1.3 * ttft_ms


def test_a_hand_over_takes_what_a_read_takes_more() -> None:
    """Second tokens of requests that are handed over come later, first ones do not."""
    for plan, later_ms in ((fleet(), 7.0), (replace(fleet(0, 0), num_both=1), 0.0)):
        slow = with_curves(plan, read_more_ms=7.0)
        before, after = (alone(one, 200, 4) for one in (plan, slow))
        assert after.first_ms == before.first_ms
        assert before.second_ms is not None
        assert after.second_ms == pytest.approx(before.second_ms + later_ms)


def test_the_way_of_a_request_is_longer_while_workers_of_a_host_compute() -> None:
    stream = TraceRequest(0, 64, 200, (1,))
    later = TraceRequest(1_000, 500, 2, (2,))

    def ttft_ms(way_ms: float, workers_per_host: int, before: list[TraceRequest]) -> float:
        plan = with_curves(fleet(), request_beside_ms=way_ms, workers_per_host=workers_per_host)
        return World(plan).run([*before, later])[-1].ttft_ms or 0

    assert ttft_ms(7, 2, [stream]) - ttft_ms(0, 2, [stream]) == pytest.approx(7, abs=0.01)
    assert ttft_ms(7, 1, [stream]) == ttft_ms(0, 1, [stream]), "control: a host for each"
    assert ttft_ms(7, 2, []) == ttft_ms(0, 2, []), "control: nobody computes"


def test_a_fleet_plays_one_trace_after_the_other_in_other_roles() -> None:
    world = World(replace(fleet(0, 0), num_both=2))
    first = TraceRequest(0, 1_024, 2, (0, 1))
    assert not world.run([first])[0].handed_over
    world.become(("prefill", "decode"))
    again, other = world.run([first, replace(first, at_ms=5_000, hash_ids=(7, 8))])
    assert again.handed_over
    assert other.handed_over
    assert again.ttft_ms is not None
    assert other.ttft_ms is not None
    assert again.ttft_ms < other.ttft_ms, "what was cached is"


@pytest.mark.parametrize("num_routers", [1, 3])
def test_time_in_which_nobody_has_anything_to_do_costs_nothing_and_changes_nothing(
    num_routers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took a heartbeat of every worker each second, and ten ticks of every router."""
    plan = with_routers(fleet(2, 2, "estimated"), num_routers)
    times_ms = (0, 30, 45_678, 45_999, 300_000, 302_500)
    trace = [TraceRequest(at_ms, 1_500, 4, (0, 1, n + 2)) for n, at_ms in enumerate(times_ms)]
    worlds = [World(plan), World(plan)]
    skipped = worlds[0].run(trace)
    after_days = worlds[0].run([replace(trace[0], at_ms=20 * 86_400_000), trace[1]])
    assert all(one.finished for one in after_days)
    monkeypatch.setattr(World, "_idle_ms", lambda _: 0.0)  # control: all of it is gone through
    assert worlds[1].run(trace) == skipped
    assert worlds[0].time.num_events < 1_000 < 3_000 < worlds[1].time.num_events


def test_of_a_large_fleet_some_pools_are_verified_and_all_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulated_world, "CHECKED_MAX", 3)
    world = World(fleet(4, 4))
    checked: list[SimulatedWorker] = []
    monkeypatch.setattr(SimulatedWorker, "check", lambda one: checked.append(one))
    world.run([TraceRequest(0, 100, 2, (n,)) for n in range(16)])
    assert 2 <= len(checked) <= 3
    pool = world.workers[-1].core.kv.pool
    pool.hold("forgotten", pool.allocate(1))
    with pytest.raises(InvariantViolation, match="blocks available"):
        world.run([TraceRequest(0, 100, 2, (99,))])


@pytest.mark.parametrize(
    ("mib_ms", "num", "why"),
    [(1e6, 40, "hold too much of the pool"), (1e8, 1, "do not end")],
)
def test_links_on_which_a_real_worker_would_end(mib_ms: float, num: int, why: str) -> None:
    world = World(with_curves(fleet(), link=LinkCost(1.0, mib_ms)))
    trace = [TraceRequest(100 * n, 1_024, 2, (2 * n, 2 * n + 1)) for n in range(num)]
    with pytest.raises(ExpiredError, match=f"{why}.*; the links are too slow"):
        world.run(trace)


def test_steps_that_end_after_their_requests_are_waited_for() -> None:
    """Longer than a request may take: each ends by that, and the step goes on."""
    world = World(with_curves(fleet(), step_more_ms=1e6))
    (outcome,) = world.run([TraceRequest(0, 1_024, 2, (0, 1))])
    assert outcome.error
    assert not any(worker.is_busy for worker in world.workers)


def test_reads_that_end_after_their_requests_are_waited_for() -> None:
    world = World(with_curves(fleet(), link=LinkCost(1.0, 4e5)))
    world.run([TraceRequest(0, 1_024, 2, (0, 1))])
    assert not any(worker.reads for worker in world.workers)


@pytest.mark.parametrize(("num_pairs", "least_ms"), [(1, 100), (50, 400)])
def test_workers_of_a_large_fleet_report_as_rarely_as_real_ones(
    num_pairs: int, least_ms: float
) -> None:
    world = World(fleet(num_pairs, num_pairs))
    told: dict[Incarnation, list[float]] = {}
    send = world.to_router

    def note(sender: Incarnation, message: ToRouterMessage) -> None:
        if isinstance(message, WorkerStats) and world.time.now_ms > 1_000:
            told.setdefault(sender, []).append(world.time.now_ms)
        send(sender, message)

    world.to_router = note  # type: ignore[method-assign]
    world.run([TraceRequest(0, 4_000, 100, tuple(range(8)))])
    # The first ones follow a submit, and are urgent.
    gaps = [b - a for times in told.values() for a, b in pairwise(times[1:])]
    assert gaps
    assert least_ms <= min(gaps) < 2 * least_ms, "control: nor more rarely"
