"""Hours, full pools and queues, thousands of requests, half a fleet lost: in virtual time.

Every event of these worlds is held to the bounds on load and waiting, every end to exact tokens and
to pools that are as they began; what is asserted here is what each world was made for.
"""

from dataclasses import replace

import pytest

from disagg.messages.session import EndReason
from disagg.routing.request import KILLS_MAX
from tests.unit.scheduling.long_worlds import (
    HALF_LOST,
    HOUR_MS,
    LAYOUTS,
    LONG_TOKENS,
    MINUTE_MS,
    POOLS_FULL,
    PRESSURE,
    QUEUES_FULL,
    TAKES_OVER,
    THOUSANDS,
    among_short_ones,
    default_bounds,
    end_with,
    fair_load,
    hour_long,
    longest_wait_ms,
    lose,
    outcomes,
    play,
    prompt,
    reader_has_most,
    slow_links,
    stands_still,
)


def test_the_bounds_of_these_worlds_are_those_of_the_settings() -> None:
    bounds = default_bounds()
    assert {"lease_ttl_ms", "reservation_ttl_ms", "request_timeout_ms", "max_waiting"} <= set(
        bounds
    )
    config = hour_long("full")
    assert {name: getattr(config, name) for name in bounds} == bounds


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefill_of_an_hour_is_handed_over(layout: str) -> None:
    world = play(hour_long(layout))
    assert outcomes(world) == {"finished": 1}
    assert world.now_ms > HOUR_MS
    assert world.num_handovers == 1
    assert not world.router.counters["replans", EndReason.LEASE_DEAD]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_also_to_a_reader_that_has_most_of_it(layout: str) -> None:
    world = play(reader_has_most(layout))
    assert outcomes(world) == {"finished": 2}
    assert world.num_handovers == 2
    client = world.clients["r1"]
    assert client.ended_ms - client.asked_ms > HOUR_MS - MINUTE_MS, "it was computed again"


def test_a_transfer_that_takes_longer_than_the_router_waits_is_not_given_up() -> None:
    """The tail that is handed over last may stand still, READs being as slow as they are."""
    config = slow_links("full")
    world = play(config)
    first, second = (world.router.record(name) for name in ("r0", "r1"))
    assert first is not None
    assert second is not None
    transfer, pull = first.generations[0].transfer, second.generations[0].pull
    assert world.clients["r0"].outcome == "finished"
    assert transfer is not None
    assert transfer.read_ms > 3 * config.request_timeout_ms
    assert pull is not None
    assert not pull.failed
    assert pull.read_ms > 3 * config.request_timeout_ms


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefill_that_stands_still_ends_in_its_bound(layout: str) -> None:
    config = stands_still(layout)
    world = play(config)
    record = world.router.record("r0")
    assert record is not None
    first, second = record.generations
    assert EndReason.LEASE_DEAD in first.cause, first
    stood_still_ms = second.started_ms - config.faults[0].at_ms  # type: ignore[operator]
    assert stood_still_ms < config.lease_ttl_ms + 2 * config.tick_ms
    assert outcomes(world) == {"finished": 1}


def test_a_lonely_prefill_that_stands_still_fails_in_the_routers_bound() -> None:
    config = replace(stands_still("hybrid"), roles=("both",))
    world = play(config)
    assert outcomes(world) == {"timeout": 1}
    waited_ms = world.clients["r0"].ended_ms - config.faults[0].at_ms  # type: ignore[operator]
    assert waited_ms < config.request_timeout_ms + 2 * config.tick_ms


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("roles", [("prefill", "decode"), ("both", "both")])
def test_full_pools_serve_everybody(roles: tuple[str, ...], seed: int) -> None:
    world = play(replace(POOLS_FULL, roles=roles), seed)
    assert outcomes(world) == {"finished": POOLS_FULL.num_requests}
    assert sum(one.core.batcher.num_preemptions for one in world.workers.values())


@pytest.mark.parametrize("seed", range(2))
def test_full_queues_refuse_the_rest_with_429(seed: int) -> None:
    world = play(QUEUES_FULL, seed)
    ends = outcomes(world)
    assert set(ends) == {"finished", "rate_limit_exceeded"}
    assert ends["finished"] >= QUEUES_FULL.max_waiting
    assert world.router.counters["requests_refused", "capacity"], "at the router's door"
    assert world.router.counters["replans", EndReason.CAPACITY], "in the workers' queues"


@pytest.mark.parametrize("num_requests", [1_000, pytest.param(6_000, marks=pytest.mark.slow)])
def test_thousands_of_requests_over_eight_workers(num_requests: int) -> None:
    world = play(replace(THOUSANDS, num_requests=num_requests, arrivals_ms=8 * num_requests))
    assert outcomes(world) == {"finished": num_requests}
    assert world.num_pulls


LOST = {
    "decode": ("w4", "w5"),
    "prefill": ("w0", "w1"),
    "both": ("w0", "w1", "w4", "w5"),
    "all that prefill": ("w0", "w1", "w2", "w3"),
}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))]
)
@pytest.mark.parametrize("lost", LOST)
def test_half_of_the_fleet_is_lost_at_once(lost: str, seed: int) -> None:
    world = play(lose(*LOST[lost]), seed)
    assert world.router.counters["workers_lost", "session_ended"] == len(LOST[lost])
    assert world.router.counters["replans", "worker_lost"]
    assert outcomes(world) == {"finished": HALF_LOST.num_requests}
    assert not world.router.counters["poison", ""]


def test_a_request_that_ends_every_worker_that_computes_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end_with(monkeypatch, "r7")
    world = play(HALF_LOST)
    ends = outcomes(world)
    poison = world.router.counters["poison", ""]  # it, and who was with it on both workers
    assert ends == {"finished": HALF_LOST.num_requests - poison, "worker_unavailable": poison}
    assert poison < HALF_LOST.num_requests // 5
    assert world.clients["r7"].outcome.startswith("worker_unavailable: 2 workers were lost")
    assert world.router.counters["workers_lost", "session_ended"] == KILLS_MAX


@pytest.mark.parametrize("seed", range(2))
def test_take_overs_of_a_lost_reader_do_not_overrun_the_other(seed: int) -> None:
    world = play(TAKES_OVER, seed)
    assert outcomes(world) == {"finished": TAKES_OVER.num_requests}
    assert world.router.counters["plans", "take_over"] >= 3
    assert world.router.counters["replans", EndReason.TAKE_OVER_REFUSED], "the limit was met"


@pytest.mark.parametrize("seed", range(2))
def test_a_prompt_larger_than_the_share_is_handed_over_among_short_ones(seed: int) -> None:
    config = among_short_ones()
    world = play(config, seed)
    assert outcomes(world) == {"finished": len(config.script)}
    request_id, client = max(world.clients.items(), key=lambda one: len(one[1].prompt))
    record = world.router.record(request_id)
    assert record is not None
    (generation,) = record.generations
    assert generation.transfer is not None
    blocks_max = world.workers["w0"].core.budget.blocks_max
    assert sum(group.full_blocks for group in generation.transfer.groups) > blocks_max
    assert client.ended_ms - client.asked_ms < 2_000


def test_long_and_short_prompts_each_wait_for_those_before_them() -> None:
    world = play(fair_load())
    assert set(outcomes(world)) == {"finished"}
    assert longest_wait_ms(world) < 2_000


@pytest.mark.parametrize("seed", [2, 11])
def test_decodes_are_preempted_while_prefixes_are_pulled(seed: int) -> None:
    world = play(PRESSURE, seed)
    assert outcomes(world) == {"finished": PRESSURE.num_requests}
    assert sum(one.core.batcher.num_preemptions for one in world.workers.values()) > 5
    assert world.num_pulls


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_seventy_thousand_tokens_in_an_hour(layout: str) -> None:
    num_tokens = 70_006
    config = hour_long(
        layout,
        num_blocks=2_400,
        prompt_tokens_max=num_tokens + 10,
        max_step_tokens=512,
        step_token_us=HOUR_MS * 1_000 // num_tokens,
    )
    (request,) = config.script
    world = play(replace(config, script=(replace(request, prompt=prompt(num_tokens)),)))
    assert outcomes(world) == {"finished": 1}
    assert world.num_handovers == 1
    assert num_tokens > LONG_TOKENS
