"""Requests that share prefixes: a synthetic mix, and traces in Mooncake's format.

Runs in the peer's environment as well: nothing of disagg is imported here.
"""

import json
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TRACE_BLOCK = 512
"""Tokens per hash id of a trace (github.com/kvcache-ai/Mooncake)."""
MEAN_INPUT, MEAN_OUTPUT = 12_000, 343
"""Of its conversation trace."""
SYSTEM_PROMPTS = 8
ANSWER = 128


@dataclass(frozen=True)
class Request:
    """A prompt by its tokens, and the length of its answer."""

    prompt: list[int]
    num_answer: int


def shared(num_requests: int, seed: int) -> list[Request]:
    """Most prompts start with one of a few system prompts (chosen unevenly).

    Some go on from an earlier conversation, its answer included; some share nothing.
    """
    chance = random.Random(seed)
    fresh = _counter(1_000_000)

    def tokens(count: int) -> list[int]:
        return [next(fresh) for _ in range(count)]

    systems = [tokens(chance.choice((1500, 3000, 6000))) for _ in range(12)]
    weights = [1 / (1 + rank) for rank in range(len(systems))]
    talks: deque[list[int]] = deque(maxlen=20)
    made = []
    for _ in range(num_requests):
        kind = chance.random()
        start: list[int] = []
        if kind < 0.25 and talks:
            start = chance.choice(talks)
        elif kind < 0.9:
            (start,) = chance.choices(systems, weights)
        prompt = start + tokens(chance.randrange(200, 1800))
        made.append(Request(prompt, ANSWER))
        talks.append(prompt + answer_of(len(made) - 1, ANSWER))
    return made


def answer_of(number: int, num_tokens: int) -> list[int]:
    """Tokens that request ``number`` is answered with."""
    first = (1 << 31) + number * 100_000
    return list(range(first, first + num_tokens))


@dataclass(frozen=True)
class Row:
    """One line of a trace."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def mooncake_rows(num_requests: int, seed: int) -> list[Row]:
    """A trace in the manner of Mooncake's conversations, in order of arrival.

    Conversations arrive at random, begin with one of a few system prompts and take turns, each of
    which repeats all before it; lengths have a long tail, and between two turns somebody thinks.
    """
    chance = random.Random(seed)
    ids = _counter(0)
    systems = [[next(ids) for _ in range(chance.randrange(1, 7))] for _ in range(SYSTEM_PROMPTS)]
    rows: list[Row] = []
    begins_ms = 0.0
    while len(rows) < 2 * num_requests:  # of the last conversations only the first turns count
        begins_ms += chance.expovariate(1 / 1_500)
        known = list(chance.choices(systems, [1 / (1 + n) for n in range(SYSTEM_PROMPTS)])[0])
        now_ms, length = begins_ms, len(known) * TRACE_BLOCK
        for _ in range(1 + min(int(chance.expovariate(1 / 2)), 12)):
            length += 1 + int(chance.lognormvariate(7.9, 1.1))
            # A block that the turn before filled in part only has another id now, as all after it.
            num_ids = -(-length // TRACE_BLOCK)
            known += [next(ids) for _ in range(num_ids - len(known))]
            output = 1 + int(chance.expovariate(1 / MEAN_OUTPUT))
            rows.append(Row(int(now_ms), length, output, tuple(known)))
            del known[length // TRACE_BLOCK :]
            length += output
            now_ms += 5_000 + chance.expovariate(1 / 30_000)
    rows.sort(key=lambda row: row.timestamp)
    return rows[:num_requests]


def read_trace(path: Path) -> list[Row]:
    """A trace of Mooncake's: a JSON object per line, further fields ignored."""
    rows = []
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        rows.append(
            Row(
                int(fields["timestamp"]),
                int(fields["input_length"]),
                int(fields["output_length"]),
                tuple(fields["hash_ids"]),
            )
        )
    return rows


def requests_of(rows: Iterable[Row]) -> list[Request]:
    """The prompts of a trace: equal hash ids stand for equal tokens."""
    made = []
    for row in rows:
        tokens = [
            hash_id * TRACE_BLOCK + offset
            for hash_id in row.hash_ids
            for offset in range(TRACE_BLOCK)
        ]
        made.append(Request(tokens[: row.input_length], row.output_length))
    return made


def workload(name: str, num_requests: int, seed: int) -> list[Request]:
    """By name: ``shared``, ``mooncake``, or a trace's path."""
    if name == "shared":
        return shared(num_requests, seed)
    if name == "mooncake":
        return requests_of(mooncake_rows(num_requests, seed))
    return requests_of(read_trace(Path(name))[:num_requests])


def _counter(first: int) -> Iterator[int]:
    return iter(range(first, 1 << 40))
