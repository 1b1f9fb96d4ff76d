"""What is asked when: kinds of requests, mixes of them, and seeded traces with token ids."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.serving.checkpoint import NUM_RESERVED

VOCAB_SIZE = 4_096
TURN_GAP_S = 1.0
"""Between two turns of a conversation at least, as they are planned."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one sort; numbers are drawn evenly between two bounds, both included.

    Attributes:
        own_tokens: of a prompt, that no other one has.
        output_tokens: of an answer.
        shared_tokens: before those, one of ``num_shared`` beginnings that many prompts have.
        num_turns: of a conversation: a later prompt begins with the one before and its answer.
    """

    name: str
    own_tokens: Range
    output_tokens: Range
    shared_tokens: Range = (0, 0)
    num_shared: int = 0
    num_turns: int = 1


CHAT = Kind("chat", (60, 250), (32, 96))
DOCUMENT = Kind("document", (1_500, 4_000), (16, 32))
CODE = Kind("code", (40, 300), (24, 64), shared_tokens=(800, 2_000), num_shared=6)
TURNS = Kind("turns", (60, 400), (24, 64), num_turns=6)
KINDS = {kind.name: kind for kind in (CHAT, DOCUMENT, CODE, TURNS)}


@dataclass(frozen=True, slots=True)
class Mix:
    """Phases of equal length, each with the shares of its kinds by name."""

    name: str
    phases: tuple[Mapping[str, float], ...]

    @property
    def is_mixed(self) -> bool:
        """Kinds come together or one after the other."""
        return len({name for phase in self.phases for name in phase}) > 1


MIXES = (
    Mix("short chat", ({"chat": 1},)),
    Mix("long documents", ({"document": 1},)),
    Mix("code, shared prefixes", ({"code": 1},)),
    Mix("multi-turn", ({"turns": 1},)),
    Mix(
        "shifting",
        (
            {"chat": 0.85, "document": 0.15},
            {"turns": 0.6, "code": 0.4},
            {"document": 0.4, "chat": 0.3, "turns": 0.3},
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        arrival_s: since the trace's begin, whatever becomes of those before.
        tokens: of its prompt; of a later turn what comes after the last answer.
        follows: number of the turn before; that one's prompt and answer come first.
    """

    arrival_s: float
    kind: str
    tokens: tuple[int, ...]
    num_output_tokens: int
    follows: int | None = None


def make_trace(mix: Mix, rate: float, num_requests: int, seed: int) -> list[Request]:
    """Requests of a Poisson process, in the order of their arrivals.

    Args:
        mix: what is asked.
        rate: requests per second.
        num_requests: of the whole trace.
        seed: equal arguments give equal traces.
    """
    rng = random.Random(f"{mix.name} {seed}")
    shared = {name: _beginnings(rng, kind) for name, kind in KINDS.items()}
    trace: list[Request] = []
    turns: dict[int, int] = {}  # of the conversations' last requests
    arrival_s = 0.0
    for number in range(num_requests):
        shares = mix.phases[number * len(mix.phases) // num_requests]
        kind = KINDS[rng.choices(list(shares), list(shares.values()))[0]]
        tokens = _draw(rng, rng.randint(*kind.own_tokens))
        if kind.num_shared:
            tokens = rng.choice(shared[kind.name]) + tokens
        follows = _turn_before(rng, trace, turns, kind, arrival_s)
        output = rng.randint(*kind.output_tokens)
        trace.append(Request(arrival_s, kind.name, tokens, output, follows))
        if kind.num_turns > 1:
            turns[number] = 1 if follows is None else turns.pop(follows) + 1
        arrival_s += rng.expovariate(rate)
    return trace


def whole_prompts(
    trace: Sequence[Request], answers: Mapping[int, Sequence[int]]
) -> list[tuple[float, list[int], int]]:
    """A trace as arrival, whole prompt, number of output tokens.

    Args:
        trace: of `make_trace`.
        answers: tokens by the request's number, of those that others follow.
    """
    prompts: list[list[int]] = []
    for one in trace:
        before = [] if one.follows is None else [*prompts[one.follows], *answers[one.follows]]
        prompts.append([*before, *one.tokens])
    return [(a.arrival_s, b, a.num_output_tokens) for a, b in zip(trace, prompts, strict=True)]


def _turn_before(
    rng: random.Random, trace: list[Request], turns: dict[int, int], kind: Kind, now_s: float
) -> int | None:
    """A conversation that can go on; of those that can, and a new one, each is as likely."""
    able = [
        number
        for number, num_turns in turns.items()
        if num_turns < kind.num_turns
        and trace[number].kind == kind.name
        and trace[number].arrival_s + TURN_GAP_S <= now_s
    ]
    return rng.choice([*able, *able, None]) if able else None


def _beginnings(rng: random.Random, kind: Kind) -> list[tuple[int, ...]]:
    return [_draw(rng, rng.randint(*kind.shared_tokens)) for _ in range(kind.num_shared)]


def _draw(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(NUM_RESERVED, VOCAB_SIZE) for _ in range(num_tokens))
