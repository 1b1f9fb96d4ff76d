"""Load of a number of streams, each asking its next request when the one before has ended."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.servers.vllm import MODEL
from benchmarks.serving.checkpoint import NUM_RESERVED

ANSWER_S = 600.0
NUM_OUTPUT_TOKENS = 64

Ask = Callable[[httpx.AsyncClient, dict[str, Any]], AsyncIterator[float]]
"""Sends a request's body; yields the moment of each token's arrival, in seconds."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is asked: a row of the table."""

    num_streams: int
    prompt_tokens: int
    sampled: bool
    vocab_size: int
    num_rounds: int
    """Requests of each stream."""

    @property
    def name(self) -> str:
        """Its name in the figures."""
        how = "sampled" if self.sampled else "greedy"
        return f"{self.num_streams} x {self.prompt_tokens} {how}, vocabulary {self.vocab_size}"

    def bodies(self, seed: int) -> list[dict[str, Any]]:
        """Requests with distinct prompts; the same ones for every system."""
        rng = random.Random(f"{self.name} {seed}")
        bodies: list[dict[str, Any]] = []
        for index in range(self.num_streams * self.num_rounds):
            body: dict[str, Any] = {
                "model": MODEL,
                "prompt": [
                    rng.randrange(NUM_RESERVED, self.vocab_size) for _ in range(self.prompt_tokens)
                ],
                "max_tokens": NUM_OUTPUT_TOKENS,
                "ignore_eos": True,
                "stream": True,
                "temperature": 0.0,
            }
            if self.sampled:
                # Without a seed: vLLM 0.32 on the CPU ends at the first request that has one.
                body |= {"temperature": 1.0, "top_p": 0.95}
                if index % 4 == 0:
                    body["logprobs"] = 5
            bodies.append(body)
        return bodies


@dataclass(slots=True)
class Times:
    """What the client saw; milliseconds, one entry per request."""

    first_ms: list[float] = field(default_factory=list)
    second_ms: list[float] = field(default_factory=list)
    per_token_ms: list[float] = field(default_factory=list)
    """Between tokens after the second."""
    gaps_ms: list[float] = field(default_factory=list)
    """Between any two tokens of a request."""
    num_tokens: int = 0
    wall_s: float = 0.0


async def completion(
    client: httpx.AsyncClient, url: str, body: dict[str, Any]
) -> AsyncIterator[float]:
    """Stream ``/v1/completions``; see `Ask`.

    Raises:
        RuntimeError: the answer is an error, or lacks tokens.
    """
    num_tokens = 0
    asked = body | {"stream_options": {"include_usage": True}}
    async with client.stream("POST", url + "/v1/completions", json=asked) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(line)
            if chunk.get("usage"):
                num_tokens = chunk["usage"]["completion_tokens"]
            if chunk["choices"] and (
                chunk["choices"][0]["text"] or not chunk["choices"][0]["finish_reason"]
            ):
                yield time.monotonic()
    if num_tokens != body["max_tokens"]:
        raise RuntimeError(f"{num_tokens} tokens instead of {body['max_tokens']}")


async def run_cell(cell: Cell, seed: int, ask: Ask) -> Times:
    """Ask everything of a cell; raises what a request raises."""
    times = Times()
    bodies = iter(cell.bodies(seed))
    limits = httpx.Limits(max_connections=2 * cell.num_streams)
    async with httpx.AsyncClient(timeout=ANSWER_S, limits=limits) as client:

        async def stream() -> None:
            for body in bodies:  # shared: whoever is free takes the next
                started = time.monotonic()
                arrivals = [moment async for moment in ask(client, body)]
                times.first_ms.append((arrivals[0] - started) * 1e3)
                times.second_ms.append((arrivals[1] - started) * 1e3)
                times.per_token_ms.append(
                    (arrivals[-1] - arrivals[1]) * 1e3 / (NUM_OUTPUT_TOKENS - 2)
                )
                times.gaps_ms += [(b - a) * 1e3 for a, b in itertools.pairwise(arrivals)]
                times.num_tokens += NUM_OUTPUT_TOKENS

        started = time.monotonic()
        await asyncio.gather(*(stream() for _ in range(cell.num_streams)))
        times.wall_s = time.monotonic() - started
    return times
