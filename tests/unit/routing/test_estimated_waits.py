"""Who waits at the router by choice, for how long, and who had better not."""

from dataclasses import replace

import pytest

from disagg.routing.policy.estimated import HOLD_MS_MAX
from disagg.routing.slo import Slo
from tests.unit.routing.builders import Router, request, worker
from tests.unit.routing.measured import ALL_STEPS, stats
from tests.unit.routing.measured_fleet import fleet, say

ALONE = worker("alone", "both", num_blocks=1000)
PATIENT = Slo(ttft_ms=4_000)


def ask(router: Router, name: str, num_tokens: int, slo: Slo = PATIENT) -> bool:
    """Whether it went to a worker at once."""
    router.generate(replace(request(name, num_tokens=num_tokens, max_tokens=64), slo=slo))
    return bool(router.submits)


def say_and_look(router: Router, **changes: int) -> None:
    router.did(
        router.core.from_worker(router.now_ms, ALONE.incarnation, stats(ALL_STEPS, **changes))
    )


def test_who_would_spoil_answers_waits_until_they_are_there() -> None:
    for slo, waits in ((PATIENT, True), (Slo(), False), (Slo(ttft_ms=40), False)):
        router = fleet(ALONE, policy="estimated", slo_tpot_ms=6.5)
        say(router, ALONE, num_running=8)
        assert ask(router, "long", 401, slo) is not waits, "control: who has no time does not wait"
        if waits:
            assert router.core.num_waiting == 1
            say(router, ALONE, num_running=8)
            assert not router.submits
            router.now_ms = 700
            assert router.did(router.core.from_worker(700, ALONE.incarnation, stats(ALL_STEPS)))
            assert [submit.key.request_id for _, submit in router.submits] == ["long"]
            assert "waited by choice, 700 ms" in router.record("long").generations[0].reason


def test_who_waits_by_choice_goes_in_time_for_its_bound() -> None:
    router = fleet(ALONE, slo_tpot_ms=3.2)
    say(router, ALONE, num_running=1)
    assert not ask(router, "long", 401)
    for now_ms, goes in ((2_200, False), (2_400, True)):  # longer than `request_timeout_ms`
        router.now_ms = now_ms
        router.did(router.core.tick(now_ms))
        assert bool(router.submits) is goes, now_ms


def test_who_would_make_many_late_is_late_itself() -> None:
    router = fleet(ALONE, slo_tpot_ms=6.5)
    say(router, ALONE, num_running=8)
    assert not ask(router, "long", 401)
    for now_ms, goes in ((2_400, False), (HOLD_MS_MAX - 1, False), (HOLD_MS_MAX, True)):
        router.now_ms = now_ms
        router.did(router.core.tick(now_ms))
        assert bool(router.submits) is goes, now_ms


def test_who_would_only_wait_at_the_worker_waits_here_and_holds_nobody_up() -> None:
    router = fleet(ALONE)
    say(router, ALONE, num_prefill_tokens_queued=9_000, num_prompts_queued=3)
    assert not ask(router, "long", 401, Slo())
    assert not ask(router, "next", 401, Slo())
    assert ask(router, "short", 3, Slo()), "its turn comes soon, by the order of steps there"
    say_and_look(router, num_prefill_tokens_queued=500, num_prompts_queued=1)
    assert [submit.key.request_id for _, submit in router.submits] == ["long", "next"]
    control = fleet(ALONE, policy="prefix_then_load")
    say(control, ALONE, num_prefill_tokens_queued=9_000, num_prompts_queued=3)
    assert ask(control, "long", 401, Slo())


def test_nobody_waits_by_choice_for_ever() -> None:
    router = fleet(ALONE)
    say(router, ALONE, num_prefill_tokens_queued=90_000, num_prompts_queued=3)
    assert not ask(router, "long", 401, Slo())
    for now_ms, goes in ((HOLD_MS_MAX - 1, False), (HOLD_MS_MAX, True)):
        router.now_ms = now_ms
        router.did(router.core.tick(now_ms))
        assert bool(router.submits) is goes


def test_who_is_due_sooner_does_not_wait_for_who_came_before_it() -> None:
    router = fleet(ALONE, slo_tpot_ms=3.2)
    say(router, ALONE, num_running=1)
    assert not ask(router, "patient", 401)
    assert not ask(router, "hurried", 401, Slo(ttft_ms=1_000))
    router.now_ms = 600
    router.did(router.core.tick(600))
    assert [submit.key.request_id for _, submit in router.submits] == ["hurried"]


@pytest.mark.parametrize(
    ("bound_ms", "num_running", "waits"),
    [(70, 8, True), (70, 0, False), (30, 8, False), (0, 8, False)],
    ids=["late", "nobody is there", "a bound that no worker keeps", "no bound"],
)
def test_who_is_late_anyway_does_not_make_others_late(
    bound_ms: int, num_running: int, waits: bool
) -> None:
    """By those before it, it is: alone it takes some 50 ms."""
    router = fleet(ALONE, slo_tpot_ms=8.0)
    queue = {"num_prefill_tokens_queued": 400, "num_prompts_queued": 1}
    say(router, ALONE, num_running=num_running, **queue)
    assert ask(router, "long", 401, Slo(ttft_ms=bound_ms)) is not waits
    if waits:
        router.now_ms = HOLD_MS_MAX - 1
        say_and_look(router, num_running=num_running, **queue)
        assert not router.submits, "however late"
        say_and_look(router, num_running=1)
        assert router.submits, "those are done"


def test_who_waits_by_choice_can_be_given_up() -> None:
    router = fleet(ALONE, slo_tpot_ms=6.5)
    say(router, ALONE, num_running=8)
    assert not ask(router, "long", 401)
    router.core.cancel(1, "long", "gone")
    assert (router.core.num_waiting, router.core.num_live) == (0, 0)
    assert ask(router, "long", 401, Slo()), "its name is free"
