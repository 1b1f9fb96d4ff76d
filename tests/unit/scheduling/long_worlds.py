"""Worlds that only virtual time can play: hours, thousands of requests, half a fleet lost."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from disagg.config.settings import Settings
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.testing.simulation.config import (
    FaultKind,
    PlannedFault,
    PlannedRequest,
    SimulationConfig,
)
from disagg.testing.simulation.simulation import Simulation
from disagg.testing.simulation.worker_model import WorkerModel

MINUTE_MS, HOUR_MS = 60_000, 3_600_000


def default_bounds() -> dict[str, Any]:
    """Every limit and time-out that the settings and the simulation both have."""
    settings = Settings()
    names = SimulationConfig.__dataclass_fields__
    sections = (settings.scheduling, settings.transfer, settings.router)
    return {
        name: value
        for section in sections
        for name, value in section.model_dump().items()
        if name in names and name not in ("max_step_tokens", "pull_tokens_min")
    }


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    numbers = random.Random(seed)
    return tuple(numbers.randrange(997) for _ in range(num_tokens))


# --- prefills of an hour

FULL, WINDOW = FullAttentionSpec(64, 1, 8, 4), SlidingWindowSpec(64, 1, 8, 4, 128)
LAYOUTS = {
    "full": plan_layout([FULL]),
    "hybrid": plan_layout([WINDOW, WINDOW, FULL]),
    "windows": plan_layout([WINDOW, WINDOW]),
}
LONG_TOKENS = 4_000


def hour_long(layout: str, **changes: Any) -> SimulationConfig:
    """A prompt whose prefill takes an hour, in chunks of half a minute, with default bounds."""
    config = SimulationConfig(
        LAYOUTS[layout],
        num_blocks=100,
        prompt_tokens_max=LONG_TOKENS + 10,
        output_tokens_max=4,
        max_step_tokens=32,
        step_token_us=HOUR_MS * 1_000 // LONG_TOKENS,
        pull_tokens_min=1 << 30,
        tick_ms=2_000,
        heartbeat_ms=4_000,
        time_limit_ms=4 * HOUR_MS,
        script=(PlannedRequest(prompt(LONG_TOKENS), 3),),
        **default_bounds(),
    )
    return replace(config, **changes)


def reader_has_most(layout: str) -> SimulationConfig:
    """The prompt again, when the prefill worker has lost its cache, the decode worker has not."""
    again_ms = HOUR_MS + 2 * MINUTE_MS
    return hour_long(
        layout,
        script=(
            PlannedRequest(prompt(LONG_TOKENS), 3, at_ms=2_000),
            PlannedRequest(prompt(LONG_TOKENS), 3, at_ms=again_ms),
        ),
        faults=(PlannedFault(0, FaultKind.KILL, "w0", at_ms=again_ms - 10_000),),
    )


def stands_still(layout: str) -> SimulationConfig:
    """The prefill worker's engine stops for an hour after ten minutes."""
    stall = PlannedFault(0, FaultKind.STALL, "w0", at_ms=10 * MINUTE_MS, stall_ms=HOUR_MS)
    return hour_long(layout, faults=(stall,))


def slow_links(layout: str) -> SimulationConfig:
    """A prompt that is read for minutes: handed over, then pulled back by who has lost it.

    The blocks of a READ each come at a time of their own; the router waits for much less.
    """
    again_ms = 30 * MINUTE_MS
    return hour_long(
        layout,
        num_blocks=200,
        step_token_us=100,
        read_ms_max=10 * MINUTE_MS,
        blocks_per_read_max=1,
        read_stuck_ms=HOUR_MS,
        lease_ttl_ms=2 * MINUTE_MS,
        request_timeout_ms=2 * MINUTE_MS,
        pull_tokens_min=8,
        script=(
            PlannedRequest(prompt(LONG_TOKENS), 3, at_ms=2_000),
            PlannedRequest(prompt(LONG_TOKENS), 3, at_ms=again_ms),
        ),
        faults=(PlannedFault(0, FaultKind.KILL, "w0", at_ms=again_ms - 10_000),),
    )


# --- many requests

SMALL_FULL, SMALL_WINDOW = FullAttentionSpec(4, 1, 8, 4), SlidingWindowSpec(4, 1, 8, 4, 8)
HYBRID = plan_layout([SMALL_WINDOW, SMALL_WINDOW, SMALL_FULL])

POOLS_FULL = SimulationConfig(
    HYBRID,
    num_blocks=45,
    prompt_tokens_max=50,
    output_tokens_max=25,
    num_requests=60,
    arrivals_ms=300,
)
"""A pool holds the longest sequence and little more; the requests hold many times as much."""

QUEUES_FULL = SimulationConfig(
    HYBRID,
    num_blocks=100,
    num_requests=200,
    arrivals_ms=60,
    max_waiting=6,
    max_sequences=3,
    requests_max=40,
)
"""Five times as many requests at once as the router takes, of which the queues hold a part."""

THOUSANDS = SimulationConfig(
    HYBRID,
    roles=("prefill",) * 4 + ("decode",) * 4,
    num_blocks=200,
    num_requests=1_000,
    arrivals_ms=8_000,
    max_step_tokens=64,
    max_sequences=16,
    requests_max=2_000,
    records_max=500,
    max_waiting=500,
    tick_ms=50,
    continued_per_mille=300,
)

HALF_LOST = SimulationConfig(
    HYBRID,
    roles=("prefill",) * 4 + ("decode",) * 4,
    num_blocks=120,
    num_requests=300,
    arrivals_ms=900,
    max_sequences=4,
    max_waiting=200,
    read_ms_max=150,
)


def lose(*workers: str, at_ms: int = 700, config: SimulationConfig = HALF_LOST) -> SimulationConfig:
    """The same world, in which these workers die at one moment and do not come back."""
    return replace(
        config, faults=tuple(PlannedFault(0, FaultKind.LOSE, one, at_ms=at_ms) for one in workers)
    )


def end_with(patch: pytest.MonkeyPatch, request_id: str) -> None:
    """Let every worker die, and come back, in a step of this request."""
    run = WorkerModel._run

    def deadly(self: WorkerModel) -> None:
        step, _ = self._launched[0]
        if all(part.key.request_id != request_id for part in step.slices):
            run(self)
        elif self.alive:  # what it said before is on its way for up to 5 ms
            self._world.later(6, lambda: self._world._faults.kill(self.me.worker_id))  # type: ignore[attr-defined]

    patch.setattr(WorkerModel, "_run", deadly)


TAKES_OVER = lose(
    "w1",
    at_ms=600,
    config=replace(
        HALF_LOST,
        roles=("prefill", "decode", "decode"),
        num_requests=100,
        max_sequences=6,
        read_ms_max=400,
        num_blocks=400,
        max_step_tokens=64,
        take_over_ms=2_000,
    ),
)
"""READs are slow, so that as many leases as a reader may have are sealed when one of two dies."""

PRESSURE = SimulationConfig(
    HYBRID,
    roles=("prefill", "decode", "both"),
    num_blocks=60,
    output_tokens_max=40,
    num_requests=120,
    arrivals_ms=1_000,
    continued_per_mille=700,
    wild_pulls_per_mille=600,
)
"""Decodes are preempted while prefixes are pulled from everywhere."""

TOKEN_MS = 10


def fair_load(num_short: int = 100, num_long: int = 4) -> SimulationConfig:
    """Prompts of seconds among many short ones: both arrive faster than they are prefilled."""
    numbers = random.Random(7)
    longs = [PlannedRequest(prompt(400, n), 3, at_ms=1_000 + 4_000 * n) for n in range(num_long)]
    shorts = [
        PlannedRequest(prompt(numbers.randint(5, 30), 100 + n), 3, at_ms=1_000 + 150 * n)
        for n in range(num_short)
    ]
    return SimulationConfig(
        HYBRID,
        num_blocks=1_500,
        prompt_tokens_max=410,
        max_step_tokens=32,
        max_sequences=200,
        max_waiting=300,
        tick_ms=200,
        step_ms_max=2,
        step_token_us=TOKEN_MS * 1_000,
        request_timeout_ms=600_000,
        reservation_ttl_ms=120_000,
        script=(*longs, *shorts),
    )


def among_short_ones(num_short: int = 200) -> SimulationConfig:
    """A prompt that takes more than the share alone; short ones hold some of it all the time."""
    numbers = random.Random(0)
    shorts = [
        PlannedRequest(prompt(numbers.randint(16, 30), 1 + n), 3, at_ms=500 + 25 * n)
        for n in range(num_short)
    ]
    return SimulationConfig(
        HYBRID,
        num_blocks=150,
        prompt_tokens_max=310,
        max_step_tokens=64,
        max_sequences=20,
        max_waiting=300,
        read_ms_max=150,
        reserve_passes_max=20,
        script=(*shorts, PlannedRequest(prompt(300), 3, at_ms=2_000)),
    )


def longest_wait_ms(world: Simulation) -> int:
    """Of a `fair_load`: how long somebody waited beyond twice the work that stood before it."""
    clients = list(world.clients.values())
    waits = []
    for client in clients:
        before = [one for one in clients if one.asked_ms <= client.asked_ms < one.ended_ms]
        work_ms = TOKEN_MS * sum(len(one.prompt) + one.max_tokens for one in before)
        waits.append(client.ended_ms - client.asked_ms - 2 * work_ms)
    return max(waits)


def outcomes(world: Simulation) -> Counter[str]:
    """How many requests ended in which way: finished, or the code of the error."""
    return Counter(client.outcome.partition(":")[0] for client in world.clients.values())


def play(config: SimulationConfig, seed: int = 0) -> Simulation:
    world = Simulation(config, seed)
    world.run()
    return world
