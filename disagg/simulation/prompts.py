"""Requests of a trace, and tokens that stand for what they say."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from disagg.errors import RequestError
from disagg.routing.slo import Slo

TRACE_BLOCK = 512
"""Tokens that a hash id stands for (github.com/kvcache-ai/Mooncake)."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it comes, how long it is, and what it shares with others.

    Attributes:
        at_ms: since the trace's begin.
        num_prompt: tokens.
        num_answer: tokens, at least one.
        hash_ids: of each `TRACE_BLOCK` tokens of the prompt; equal ones stand for equal tokens
            with equal tokens before them.
        tokens: of the prompt, where they are known; then ``hash_ids`` say nothing.
        slo: its own; None: that of all.
    """

    at_ms: float
    num_prompt: int
    num_answer: int
    hash_ids: tuple[int, ...] = field(repr=False)
    tokens: tuple[int, ...] = field(default=(), repr=False)
    slo: Slo | None = None


class Prompts:
    """Makes token ids of hash ids: where those are equal, so are these, and nowhere else."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def tokens(self, request: TraceRequest) -> tuple[int, ...]:
        """The prompt: its own, or all tokens of a block are one, other than any other block's.

        Raises:
            RequestError: more different blocks than there are ids of tokens.
        """
        if request.tokens:
            return request.tokens
        numbers, tokens = self._numbers, []
        for hash_id in request.hash_ids:
            tokens += [numbers.setdefault(hash_id, len(numbers))] * TRACE_BLOCK
        if len(numbers) >= 1 << 31:
            raise RequestError("hash_ids: too many different ones", param="hash_ids")
        del tokens[request.num_prompt :]
        return tuple(tokens)


def own_rate(requests: Sequence[TraceRequest]) -> float:
    """Requests per second as they come, in order: at this rate `at_rate` changes no gap.

    1 where all come at one moment.
    """
    lasts_ms = requests[-1].at_ms - requests[0].at_ms
    return 1000 * (len(requests) - 1) / lasts_ms if lasts_ms else 1.0


def at_rate(requests: Sequence[TraceRequest], per_second: float) -> list[TraceRequest]:
    """The same requests in the same order, stretched to so many per second on average."""
    if not requests:
        return []
    begin, last = requests[0].at_ms, requests[-1].at_ms
    wanted_ms = 1000 * len(requests) / per_second
    # As many gaps as requests: one after the last arrival is counted too.
    now_ms = (last - begin) * len(requests) / max(1, len(requests) - 1)
    factor = wanted_ms / now_ms if now_ms else 0.0
    return [replace(one, at_ms=(one.at_ms - begin) * factor) for one in requests]
