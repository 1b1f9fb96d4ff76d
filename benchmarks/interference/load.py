"""Running decodes, and long prompts that arrive meanwhile, whatever the system makes of them."""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.servers.vllm import MODEL
from benchmarks.serving.checkpoint import NUM_RESERVED
from benchmarks.serving.load import ANSWER_S, Ask

NUM_LONG_OUTPUT_TOKENS = 8
MS = 1e3


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked during ``lasts_s`` seconds; every answer is waited for, however late.

    Attributes:
        lasts_s: until when anything is asked.
        every_s: mean time between long prompts; 0 for none.
        num_streams: decodes that run all the time: each asks again when its answer has ended.
        prompt_tokens: of their prompts.
        num_output_tokens: of their answers; the first ones are shorter, so that they do not end
            together.
        long_tokens: least and most of a long prompt.
    """

    lasts_s: float
    every_s: float
    num_streams: int = 4
    prompt_tokens: int = 200
    num_output_tokens: int = 400
    long_tokens: tuple[int, int] = (4_000, 8_000)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A long prompt, asked ``at_s`` seconds after the start."""

    at_s: float
    prompt_tokens: int


def plan_arrivals(load: Load, seed: int) -> list[Arrival]:
    """When which long prompt arrives: gaps of half to one and a half of the mean, evenly drawn."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s = load.every_s / 2
    while load.every_s and at_s < load.lasts_s:
        arrivals.append(Arrival(at_s, rng.randint(*load.long_tokens)))
        at_s += load.every_s * rng.uniform(0.5, 1.5)
    return arrivals


@dataclass(slots=True)
class Seen:
    """What the client saw.

    Attributes:
        gaps_ms: between tokens of the running decodes that follow each other, where the gap began
            before the load's end.
        num_tokens: of the running decodes, before the load's end.
        first_ms: of the running decodes' prompts, to the first token.
        long_first_ms: of the long prompts, from their time in the plan.
        wall_s: until the last answer.
    """

    load: Load
    gaps_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    first_ms: list[float] = field(default_factory=list)
    long_first_ms: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of all running decodes."""
        return self.num_tokens / self.load.lasts_s

    def add_running(self, asked_s: float, arrivals_s: Sequence[float]) -> None:
        """Add an answer of a running decode; times since the load's start."""
        self.first_ms.append((arrivals_s[0] - asked_s) * MS)
        within = [moment for moment in arrivals_s if moment < self.load.lasts_s]
        self.num_tokens += len(within)
        pairs = itertools.pairwise(arrivals_s[: len(within) + 1])
        self.gaps_ms += [(after - before) * MS for before, after in pairs]


def percentile(samples: Sequence[float], percent: float) -> float:
    """The least sample that ``percent`` of all do not exceed."""
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


async def run(load: Load, seed: int, vocab_size: int, ask: Ask) -> Seen:
    """Put a load on a system; raises what a request raises."""
    seen = Seen(load)

    def body(rng: random.Random, prompt_tokens: int, num_output_tokens: int) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": [rng.randrange(NUM_RESERVED, vocab_size) for _ in range(prompt_tokens)],
            "max_tokens": num_output_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0.0,
        }

    def now_s() -> float:
        return time.monotonic() - started

    async def answer(given: dict[str, Any]) -> list[float]:
        return [moment - started async for moment in ask(client, given)]

    async def stream(number: int) -> None:
        rng = random.Random(f"{seed} {number}")  # the same prompts for every system
        num_tokens = load.num_output_tokens * (number + 1) // load.num_streams
        while (asked_s := now_s()) < load.lasts_s:
            seen.add_running(asked_s, await answer(body(rng, load.prompt_tokens, num_tokens)))
            num_tokens = load.num_output_tokens

    async def disturb(arrival: Arrival, given: dict[str, Any]) -> None:
        await asyncio.sleep(arrival.at_s - now_s())
        seen.long_first_ms.append(((await answer(given))[0] - arrival.at_s) * MS)

    rng = random.Random(seed)
    planned = [
        (arrival, body(rng, arrival.prompt_tokens, NUM_LONG_OUTPUT_TOKENS))
        for arrival in plan_arrivals(load, seed)
    ]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=ANSWER_S, limits=limits) as client:
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(load.num_streams):
                group.create_task(stream(number))
            for arrival, given in planned:
                group.create_task(disturb(arrival, given))
        seen.wall_s = now_s()
    return seen
