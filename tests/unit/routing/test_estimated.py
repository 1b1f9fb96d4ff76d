"""Plans that weigh times: each of the choices is made where it is the best one, and only there."""

from dataclasses import replace

import pytest

from disagg.errors import SloError
from disagg.messages.identity import RequestKey
from disagg.messages.reports import TransferKind
from disagg.messages.submit import Role
from disagg.routing.actions import Fail
from disagg.routing.generation import Generation
from disagg.routing.slo import Slo
from tests.unit.routing.builders import Router, request, worker
from tests.unit.routing.measured import ALL_STEPS, stats, step_times, transfer
from tests.unit.routing.measured import DECODES as DECODE_STEPS
from tests.unit.routing.measured import PREFILLS as PREFILL_STEPS
from tests.unit.routing.measured_fleet import D2, P2, D, P, fleet, roles, say, served

LONG = tuple(range(100, 501))


def test_a_long_prompt_beside_busy_decodes_is_handed_over() -> None:
    router = fleet(P, D)
    say(router, D, num_running=8)
    assert roles(served(router)) == {"p": Role.PREFILL, "d": Role.DECODE}


def test_a_short_rest_is_prefilled_where_it_decodes() -> None:
    """A turn of a chat whose history the decode worker has."""
    router = fleet(P, D)
    router.holds(D, LONG[:400])
    say(router, D, num_running=2)
    assert roles(served(router)) == {"d": Role.LOCAL}
    control = fleet(P, D, policy="prefix_then_load", pull_tokens_min=1000)
    control.holds(D, LONG[:400])
    say(control, D, num_running=2)
    assert roles(served(control)) == {"p": Role.PREFILL, "d": Role.DECODE}


def test_a_busy_prefill_side_is_gone_round() -> None:
    router = fleet(P, D)
    say(router, P, num_prefill_tokens_queued=9_000, num_waiting=5)
    say(router, D, num_running=1)
    assert roles(served(router)) == {"d": Role.LOCAL}
    idle = fleet(P, D)
    say(idle, D, num_running=8)
    assert "p" in roles(served(idle)), "control"


def test_a_prefix_is_pulled_where_reading_takes_less_than_computing() -> None:
    for link_ms, pulls in ((1, True), (4000, False)):
        router = fleet(P, P2, D, link_ms=link_ms)
        router.holds(P2, LONG[:400])
        say(router, P2, num_prefill_tokens_queued=9_000, num_waiting=5)
        say(router, D, num_running=8)
        found = served(router)
        pull = found["p"].pull if "p" in found else None
        owners = [s.pull.owner.incarnation.worker_id for s in found.values() if s.pull]
        assert (owners == ["p2"]) is pulls, (link_ms, roles(found), pull)


def test_an_idle_machine_serves_alone_where_that_is_faster() -> None:
    assert roles(served(fleet(P, D, link_ms=500))) == {"d": Role.LOCAL}


@pytest.mark.parametrize(("num", "num_slow", "slow_ms"), [(9_000, 60, 1_000), (300, 30, 4_000)])
def test_a_network_that_was_slow_for_a_while_is_handed_over_by_again(
    num: int, num_slow: int, slow_ms: int
) -> None:
    router = fleet(P, D)
    say(router, D, num_running=8)
    speeds, plan = router.core._fleet.speeds, Generation(RequestKey("w", 1), 0, P, D, "", 0, 9)

    def read(num: int, read_ms: int) -> None:
        for _ in range(num):
            speeds.report(plan, transfer(plan.key, P.incarnation, 4096, read_ms))

    def is_handed_over() -> bool:
        found = served(router)
        router.core.cancel(router.now_ms, "r", "asked")
        return "p" in found

    read(num, 3)
    assert is_handed_over()
    read(num_slow, slow_ms)
    assert not is_handed_over()
    router.now_ms = 5_000
    assert not is_handed_over(), "control: a moment later"
    router.now_ms = 120_000
    assert is_handed_over(), "and its READs will say how it is"


def test_what_others_lose_has_a_weight() -> None:
    for weight, who in ((0.0, {"d"}), (5.0, {"p", "d"})):
        router = fleet(P, D, others_weight=weight, link_ms=60)
        say(router, D, num_running=4)
        assert set(served(router)) == who, weight


def test_a_slow_worker_gets_less() -> None:
    router = fleet(P, P2, D)
    slow = step_times(PREFILL_STEPS, slower=50)
    router.core.from_worker(0, P.incarnation, stats(replace(slow, num_steps=10**6)))
    for _ in range(3):
        slow = step_times(PREFILL_STEPS * 4, slower=50)
        router.core.from_worker(0, P.incarnation, stats(replace(slow, num_steps=2 * 10**6)))
    say(router, D, num_running=8)
    assert "p2" in roles(served(router))


def test_without_measurements_plans_are_as_by_default() -> None:
    for silent in (True, False):
        router = Router(P, D, policy="estimated")
        if not silent:
            only = stats(step_times(DECODE_STEPS))
            router.core.from_worker(0, D.incarnation, only)
        router.generate(request(num_tokens=41))
        assert roles(dict(router.submits)) == {"d": Role.DECODE, "p": Role.PREFILL}
        (generation,) = router.record("r").generations
        assert generation.estimate is None
        assert [one.chosen for one in generation.considered] == [True]


def test_who_has_no_room_is_waited_for_only_where_that_takes_less() -> None:
    for queued, waits in ((1_000, True), (60_000, False)):
        router = fleet(P, D, worker_prefill_tokens_max=400)
        say(router, D, num_running=8)
        router.generate(request("first", num_tokens=490, max_tokens=5))
        assert "p" in dict(router.submits)
        say(router, P, num_prefill_tokens_queued=queued, num_waiting=1)
        found = served(router)
        assert (not found) is waits, (queued, roles(found))


def test_what_no_plan_can_keep_is_shed_if_it_is_asked_for() -> None:
    for slo, refused in (
        (Slo(), False),
        (Slo(ttft_ms=20), False),
        (Slo(ttft_ms=20, sheds=True), True),
        (Slo(ttft_ms=60_000, sheds=True), False),
    ):
        router = fleet(P, D)
        served(router, slo=slo)
        errors = [a.error for a in router.actions if isinstance(a, Fail)]
        assert bool(errors) is refused, slo
        if refused:
            (error,) = errors
            assert isinstance(error, SloError)
            assert (error.http_status, error.param) == (429, "disagg.ttft_ms")
            assert error.retry_after_s == 0, "nothing is in its way: later it is as late"
            assert router.core.counters["requests_refused", "slo"] == 1
            assert router.record("r").outcome == "failed"


def test_a_plan_that_keeps_the_bound_is_taken_before_a_request_is_shed() -> None:
    """However dear it is for others: by the plan that is best for all it would be refused."""
    for slo, who in (
        (Slo(), {"p", "d"}),
        (Slo(ttft_ms=100), {"p", "d"}),
        (Slo(ttft_ms=100, sheds=True), {"d"}),
        (Slo(ttft_ms=1000, sheds=True), {"p", "d"}),
        (Slo(ttft_ms=20, sheds=True), set()),
    ):
        router = fleet(P, D, others_weight=50.0)
        say(router, P, num_prefill_tokens_queued=700, num_waiting=1)
        say(router, D, num_running=8)
        assert set(served(router, slo=slo)) == who, slo


def test_who_is_shed_for_the_answers_of_others_may_come_again() -> None:
    """Alone at the worker its prompt takes some 45 ms, between eight answers 50."""
    for bound_ms, may_come in ((48, True), (20, False)):
        router = fleet(D)
        say(router, D, num_running=8)
        served(router, slo=Slo(ttft_ms=bound_ms, sheds=True))
        (error,) = [a.error for a in router.actions if isinstance(a, Fail)]
        assert isinstance(error, SloError)
        assert bool(error.retry_after_s) is may_come, (bound_ms, error.message)


def test_who_is_shed_comes_again_within_a_minute() -> None:
    router = fleet(P, D)
    for one in (P, D):
        say(router, one, num_prefill_tokens_queued=10**7, num_waiting=10**4)
    served(router, slo=Slo(ttft_ms=2_000, sheds=True))
    (error,) = [a.error for a in router.actions if isinstance(a, Fail)]
    assert isinstance(error, SloError)
    assert error.retry_after_s == 60


def test_a_request_that_waits_longer_than_it_wants_is_shed() -> None:
    slo = Slo(ttft_ms=60_000, sheds=True)
    router = fleet(
        replace(P, max_sequences=1),
        replace(D, max_sequences=1),
        worker_waiting_max=0,
        request_timeout_ms=10**6,
    )
    router.generate(request("first"))
    assert served(router, slo=slo) == {}, "it waits"
    router.now_ms = 59_000
    assert not [a for a in router.core.tick(router.now_ms) if isinstance(a, Fail)]
    router.now_ms = 60_001
    (failed,) = (a for a in router.core.tick(router.now_ms) if isinstance(a, Fail))
    assert (failed.request_id, type(failed.error)) == ("r", SloError)


@pytest.mark.parametrize("num_queued", [0, 9_000])
def test_who_is_shed_is_shown_all_that_was_weighed(num_queued: int) -> None:
    """Also where it would wait by choice, were there a plan in time."""
    router = fleet(P, P2, D, D2)
    for one in (P, P2, D, D2):
        say(router, one, num_prefill_tokens_queued=num_queued, num_waiting=3)
    served(router, slo=Slo(ttft_ms=20, sheds=True))
    refused = router.record("r").refused
    assert len(refused) > 2
    assert [one.chosen for one in refused].count(True) == 1


def test_a_request_that_has_begun_is_never_shed() -> None:
    router = fleet(P, D)
    found = served(router, slo=Slo(ttft_ms=60_000, sheds=True))
    who, submit = next(iter(found.items()))
    router.now_ms = 10**6
    router.lost(worker(who))
    assert router.submits, "it goes on, however late"
    assert submit.key.request_id == "r"


def test_the_record_says_what_was_weighed() -> None:
    router = fleet(P, P2, D, D2)
    router.holds(P, LONG[:100])
    say(router, P, num_prefill_tokens_queued=50, num_waiting=1)
    router.holds(D2, LONG[:40])
    say(router, D2, num_running=2)
    served(router)
    (generation,) = router.record("r").generations
    shown = generation.considered
    assert 3 <= len(shown) <= 16
    (chosen,) = (one for one in shown if one.chosen)
    assert (chosen.prefill, chosen.decode) == (
        generation.prefill.worker_id,
        generation.decode.worker_id,
    )
    assert chosen.estimate == generation.estimate
    assert "expected TTFT" in generation.reason
    least = min(one.estimate.cost_ms(1.0) for one in shown if one.estimate is not None)
    assert generation.estimate is not None
    assert generation.estimate.cost_ms(1.0) == least


@pytest.mark.parametrize("policy", ["prefix_then_load", "local", "cache_affinity"])
def test_plans_of_every_policy_are_estimated(policy: str) -> None:
    router = fleet(P, D, policy=policy) if policy != "local" else fleet_without_links(policy)
    served(router)
    (generation,) = router.record("r").generations
    assert generation.estimate is not None
    assert len(generation.considered) == 1


def fleet_without_links(policy: str) -> Router:
    router = Router(P, D, policy=policy, worker_silent_ms=10**6)
    for one in (P, D):
        say(router, one)
    return router


def test_keys_of_the_warm_up_are_real() -> None:
    """Negative control of the fleet: without reports nothing is known of links."""
    router = Router(P, D, policy="estimated", worker_silent_ms=10**6)
    for one in (P, D):
        say(router, one)
    served(router)
    (generation,) = router.record("r").generations
    assert generation.estimate is None
    assert transfer(RequestKey("r", 1), P.incarnation, 1, 1).kind is TransferKind.HANDOVER


@pytest.mark.parametrize(
    ("policy", "slo", "timed", "load"),
    [
        ("estimated", Slo(), tuple(1e160 * one for one in ALL_STEPS.timed), {}),
        (
            "prefix_then_load",
            Slo(500, 0, True),
            (1e305,) * len(ALL_STEPS.timed),
            {"num_running": 10**6, "num_decoding": 10**6, "num_prefill_tokens_queued": 10**9},
        ),
    ],
)
def test_what_a_worker_says_of_its_steps_may_be_as_large_as_may_be(
    policy: str, slo: Slo, timed: tuple[float, ...], load: dict[str, int]
) -> None:
    """A plan that could not be made kept all that waited, and with it the router."""
    router = Router(policy=policy)
    router.join(P, stats(replace(ALL_STEPS, timed=timed), **load))
    router.generate(replace(request("r", num_tokens=401, max_tokens=64), slo=slo))
    assert not router.core.num_waiting
    router.did(router.core.tick(100))
