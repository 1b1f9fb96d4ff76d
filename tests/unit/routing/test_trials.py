"""Who would be shed for how slow workers are goes now and then, and what it takes is learned."""

from dataclasses import replace
from functools import partial

import pytest

from disagg.errors import SloError
from disagg.messages.submit import Submit
from disagg.routing.slo import Slo
from disagg.routing.trials import PAUSE_MS
from disagg.simulation.curves import Surface
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.world import World
from tests.unit.routing.builders import Router, request
from tests.unit.routing.measured_fleet import D, fleet, say
from tests.unit.simulation.fleets import fleet as simulated_fleet

SOON = Slo(ttft_ms=20, sheds=True)


def ask(router: Router, name: str, slo: Slo = SOON) -> Submit | None:
    """Ask for a prompt whose first token is expected after more than 40 ms; None: it is shed."""
    new = request(name, num_tokens=401, max_tokens=100, tenant=name)
    router.generate(replace(new, slo=slo, received_ms=router.now_ms))
    if router.submits:
        ((_, submit),) = router.submits
        return submit
    assert isinstance(router.error, SloError)
    assert router.error.retry_after_s == 0
    return None


def test_after_a_while_of_refusals_one_goes_and_says_why() -> None:
    router = fleet(D)
    assert ask(router, "a") is None
    router.now_ms += PAUSE_MS - 1
    assert ask(router, "b") is None
    router.now_ms += 1
    assert ask(router, "c") is not None
    (plan,) = router.record("c").generations
    assert plan.reason.endswith("too late by what was measured: it goes to measure it again")
    assert [one.chosen for one in plan.considered] == [True]
    assert ask(router, "d") is None, "one is enough until it is known what came of it"
    router.now_ms += PAUSE_MS
    assert ask(router, "e") is not None


@pytest.mark.parametrize(("took_ms", "goes"), [(1, True), (500, False)])
def test_the_next_one_goes_at_once_only_where_the_last_one_was_quick(
    took_ms: int, goes: bool
) -> None:
    router = fleet(D)
    assert ask(router, "a") is None
    router.now_ms += PAUSE_MS
    submit = ask(router, "b")
    assert submit is not None
    router.now_ms += took_ms
    router.tokens(D, submit, 401, 7)
    router.core.cancel(router.now_ms, "b", "enough")
    say(router, D)
    assert (ask(router, "c") is not None) is goes
    if goes:
        router.core.cancel(router.now_ms, "c", "enough")
        router.now_ms += PAUSE_MS // 2
        assert ask(router, "d") is None, "of the last one nothing is known"


def test_who_would_be_in_time_without_a_queue_is_no_trial() -> None:
    router = fleet(D)
    say(router, D, num_prefill_tokens_queued=10**6, num_waiting=10**3)
    for number in range(3):
        new = request(f"{number}", num_tokens=401, max_tokens=100)
        router.generate(replace(new, slo=Slo(ttft_ms=2_000, sheds=True)))
        assert isinstance(router.error, SloError)
        assert router.error.retry_after_s > 0
        router.now_ms += 2 * PAUSE_MS


@pytest.mark.parametrize("policy", ["prefix_then_load", "estimated"])
def test_a_fleet_that_was_slow_at_first_does_not_refuse_all_for_ever(policy: str) -> None:
    plan = replace(simulated_fleet(policy=policy), slo=Slo(300, 0.0, sheds=True))
    world = World(plan)
    slow_ms = 30_000

    def slower(surface: Surface) -> Surface:
        return replace(surface, ms=tuple(tuple(20 * ms for ms in row) for row in surface.ms))

    quick = plan.curves
    slow = replace(quick, prefill=slower(quick.prefill), decode=slower(quick.decode))
    for worker in world.workers:
        worker._curves = slow
        world.time.after(slow_ms, partial(setattr, worker, "_curves", quick))
    found = world.run([TraceRequest(1_000.0 * n, 300, 10, (n,)) for n in range(90)])
    early = [one for one in found if one.request.at_ms < slow_ms]
    late = [one for one in found if one.request.at_ms > 2 * slow_ms]
    assert {one.error for one in early} == {"", "slo_unattainable"}, "control"
    assert [one.error for one in late] == [""] * len(late)
