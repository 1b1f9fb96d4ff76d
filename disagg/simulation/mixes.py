"""Traces made by rate and mix: what users ask, in five kinds."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from disagg.errors import ConfigError
from disagg.simulation.prompts import TRACE_BLOCK, TraceRequest

REQUESTS_MAX = 2_000_000
TOKENS_MIN = 3
"""Of a model: prompt and answer have one each, and together less than the model takes."""
TURN_PAUSE_MS = 15_000
"""Mean time between an answer's begin and its reader's next turn."""
TURNS_MEAN = 4
BEFORE_S = 4 * TURNS_MEAN * TURN_PAUSE_MS / 1000
"""For so long before a trace conversations begin: 98 % of those that go on when it begins."""
MAYBE_EMPTY = 50
"""Expected requests, above which some come for sure."""
SYSTEM_PROMPTS, REPOSITORIES = 8, 16


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts and answers, for the model that is to serve them.

    Attributes:
        tokens_max: prompt and answer together; prompts are cut to fit.
        scale: of all lengths; 1: as large models are used.
    """

    tokens_max: int
    scale: float = 1.0


class _Maker:
    """Draws the requests of one trace."""

    def __init__(self, lengths: Lengths, seed: int) -> None:
        self.chance = random.Random(seed)
        self._lengths = lengths
        self._ids = itertools.count()

    def fresh(self, num_blocks: int) -> list[int]:
        """Ids of blocks that nobody has."""
        return [next(self._ids) for _ in range(num_blocks)]

    def scaled(self, num_tokens: float) -> int:
        """So many tokens, at least one, for this model."""
        return max(1, round(num_tokens * self._lengths.scale))

    def blocks(self, num_tokens: float) -> int:
        """The same in whole blocks, at least one."""
        return max(1, round(self.scaled(num_tokens) / TRACE_BLOCK))

    def answer(self, mean: float) -> int:
        """Tokens of an answer."""
        return max(2, self.scaled(min(self.chance.expovariate(1 / mean), 4 * mean)))

    def long_tailed(self, median: float, sigma: float) -> int:
        """Tokens, half of them below the median, some far above."""
        return self.scaled(self.chance.lognormvariate(0, sigma) * median)

    def arrivals(self, per_second: float, lasts_ms: float) -> Iterator[float]:
        """Moments that know nothing of each other."""
        at_ms = self.chance.expovariate(per_second) * 1000
        while at_ms < lasts_ms:
            yield at_ms
            at_ms += self.chance.expovariate(per_second) * 1000

    def request(
        self, at_ms: float, shared: list[int], num_new: int, num_answer: int
    ) -> TraceRequest:
        """Known blocks and tokens of its own behind them, cut to what the model takes."""
        tokens_max = self._lengths.tokens_max
        num_answer = max(1, min(num_answer, tokens_max // 2))
        num_prompt = min(len(shared) * TRACE_BLOCK + num_new, tokens_max - num_answer - 1)
        num_blocks = -(-num_prompt // TRACE_BLOCK)
        ids = [*shared[:num_blocks], *self.fresh(num_blocks - len(shared))]
        return TraceRequest(at_ms, num_prompt, num_answer, tuple(ids))


def _short_chat(make: _Maker, per_second: float, lasts_ms: float) -> Iterator[TraceRequest]:
    """A system prompt of a few, a question, an answer."""
    systems = [make.fresh(make.blocks(512)) for _ in range(SYSTEM_PROMPTS)]
    weights = [1 / (1 + rank) for rank in range(SYSTEM_PROMPTS)]
    for at_ms in make.arrivals(per_second, lasts_ms):
        (system,) = make.chance.choices(systems, weights)
        yield make.request(at_ms, system, make.long_tailed(150, 0.8), make.answer(200))


def _long_documents(make: _Maker, per_second: float, lasts_ms: float) -> Iterator[TraceRequest]:
    """Each its own document, and little said about it."""
    for at_ms in make.arrivals(per_second, lasts_ms):
        yield make.request(at_ms, [], make.long_tailed(10_000, 0.6), make.answer(120))


def _shared_code(make: _Maker, per_second: float, lasts_ms: float) -> Iterator[TraceRequest]:
    """One of a few repositories, and a place in it."""
    sizes = [make.blocks(make.chance.choice((4096, 8192, 12_288))) for _ in range(REPOSITORIES)]
    repositories = [make.fresh(size) for size in sizes]
    weights = [1 / (1 + rank) for rank in range(REPOSITORIES)]
    for at_ms in make.arrivals(per_second, lasts_ms):
        (known,) = make.chance.choices(repositories, weights)
        yield make.request(at_ms, known, make.long_tailed(500, 0.7), make.answer(250))


def _multi_turn(make: _Maker, per_second: float, lasts_ms: float) -> Iterator[TraceRequest]:
    """Conversations, each turn of which repeats all before it; some began before the trace."""
    before_ms = BEFORE_S * 1000
    goes_on = math.log(TURNS_MEAN / (TURNS_MEAN - 1))  # so that whole turns have that mean
    found: list[TraceRequest] = []
    for begin_ms in make.arrivals(per_second / TURNS_MEAN, lasts_ms + before_ms):
        at_ms, known, num_known = begin_ms - before_ms, make.fresh(1), TRACE_BLOCK
        num_turns = min(1 + int(make.chance.expovariate(goes_on)), 10 * TURNS_MEAN)
        for _ in range(num_turns):
            num_new = num_known - len(known) * TRACE_BLOCK + make.long_tailed(200, 0.9)
            one = make.request(at_ms, known, num_new, make.answer(250))
            if 0 <= at_ms < lasts_ms:
                found.append(one)
            num_known = one.num_prompt + one.num_answer
            # The block that a turn fills in part has another id in the next one.
            known = list(one.hash_ids[: one.num_prompt // TRACE_BLOCK])
            at_ms += make.chance.expovariate(1 / TURN_PAUSE_MS)
    yield from sorted(found, key=lambda one: one.at_ms)


def _shifting(make: _Maker, per_second: float, lasts_ms: float) -> Iterator[TraceRequest]:
    """The others in turn, a quarter of the time each."""
    part_ms = lasts_ms / len(_CALM)
    for number, mix in enumerate(_CALM.values()):
        for one in mix(make, per_second, part_ms):
            at_ms = one.at_ms + number * part_ms
            yield TraceRequest(at_ms, one.num_prompt, one.num_answer, one.hash_ids)


_CALM: dict[str, Callable[[_Maker, float, float], Iterator[TraceRequest]]] = {
    "short-chat": _short_chat,
    "long-documents": _long_documents,
    "shared-code": _shared_code,
    "multi-turn": _multi_turn,
}
MIXES = {**_CALM, "shifting": _shifting}


def check_mix(mix: str, per_second: float, lasts_s: float, lengths: Lengths, seed: int) -> None:
    """Refuse what `make_trace` would, without making long traces; arguments and errors as there."""
    _check(mix, per_second, lasts_s, lengths)
    if per_second * lasts_s < MAYBE_EMPTY:
        make_trace(mix, per_second, lasts_s, lengths, seed)


def make_trace(
    mix: str, per_second: float, lasts_s: float, lengths: Lengths, seed: int
) -> list[TraceRequest]:
    """A trace by mix and rate; the same seed brings the same.

    Args:
        mix: a name in `MIXES`.
        per_second: mean rate of requests.
        lasts_s: until when requests come.
        lengths: of prompts and answers.
        seed: of everything that is drawn.

    Raises:
        ConfigError: no mix has the name, prompts have no room, or the trace would be too long or
            empty.
    """
    _check(mix, per_second, lasts_s, lengths)
    found = list(MIXES[mix](_Maker(lengths, seed), per_second, lasts_s * 1000))
    if not found:
        raise ConfigError(f"{per_second:g}/s: no request comes within {lasts_s:g} s", param="rate")
    return found


def _check(mix: str, per_second: float, lasts_s: float, lengths: Lengths) -> None:
    if mix not in MIXES:
        raise ConfigError(f"no mix is named {mix!r}; known: {', '.join(MIXES)}", param="mix")
    if lengths.tokens_max < TOKENS_MIN:
        raise ConfigError(
            f"scheduling.max_model_tokens: {TOKENS_MIN} at least for the requests of a mix",
            param="scheduling.max_model_tokens",
        )
    # Conversations that begin before the trace are made, too.
    before_s = BEFORE_S if mix in ("multi-turn", "shifting") else 0
    if per_second * (lasts_s + before_s) > REQUESTS_MAX:
        raise ConfigError(f"{per_second:g}/s: more than {REQUESTS_MAX:,} requests", param="rate")
