"""How fast this machine is: bounds for requests, and rates that it can just serve."""

import asyncio
import random
import time
from statistics import median

from benchmarks.policy.figures import Slo
from benchmarks.policy.fleet import Fleet, System
from benchmarks.policy.load import ask, play
from benchmarks.policy.traces import KINDS, MIXES, VOCAB_SIZE, Kind, Mix, make_trace
from benchmarks.serving.checkpoint import NUM_RESERVED

TTFT_FACTOR, TPOT_FACTOR = 5.0, 3.0
"""A request may take so many times as long as alone on an idle fleet."""
NUM_ALONE, ALONE_TOKENS, NUM_AT_ONCE, WARM_UP_RATE = 4, 32, 16, 4.0
WARM_UP_SEED, CAPACITY_SEED = 1_000, 2_000


def warm_up(fleet: Fleet, systems: tuple[System, ...]) -> None:
    """Let steps of all sizes and hand-overs between all workers be measured; none is cold later."""
    for number, system in enumerate(systems):
        fleet.become(system)
        trace = make_trace(MIXES[-1], WARM_UP_RATE, NUM_AT_ONCE, WARM_UP_SEED + number)
        asyncio.run(play(fleet.url, trace, f"warm-{number}"))


def measure_slos(fleet: Fleet, colocated: System) -> dict[str, Slo]:
    """By kind: factors of what its requests take one after the other."""
    fleet.become(colocated)
    rng = random.Random(0)
    slos = {}
    for kind in KINDS.values():
        answers = [
            asyncio.run(
                ask(fleet.url, middle_prompt(rng, kind), ALONE_TOKENS, f"alone-{kind.name}-{n}")
            )
            for n in range(NUM_ALONE)
        ]
        slos[kind.name] = Slo(
            TTFT_FACTOR * median(one.ttft_ms for one in answers),
            TPOT_FACTOR * median(one.tpot_ms for one in answers),
        )
    return slos


def measure_capacities(fleet: Fleet, colocated: System) -> dict[str, float]:
    """By mix: requests per second that come at once, on two workers of both roles."""
    return {mix.name: measure_capacity(fleet, colocated, mix) for mix in MIXES}


def measure_capacity(fleet: Fleet, colocated: System, mix: Mix) -> float:
    """Requests per second of a mix that come at once."""
    fleet.become(colocated)
    trace = make_trace(mix, 1_000.0, NUM_AT_ONCE, CAPACITY_SEED)
    started = time.monotonic()
    asyncio.run(play(fleet.url, trace, f"at-once-{mix.name.replace(' ', '-')}"))
    return NUM_AT_ONCE / (time.monotonic() - started)


def middle_prompt(rng: random.Random, kind: Kind) -> list[int]:
    """Of middle length, with a beginning that nobody has."""
    num_tokens = sum(kind.own_tokens) // 2 + sum(kind.shared_tokens) // 2
    return [rng.randrange(NUM_RESERVED, VOCAB_SIZE) for _ in range(num_tokens)]
