"""The batches that are sampled, the peer that sorts, and the clock."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from disagg.messages.sampling import SamplingParams

NUM_ROWS = 16
BURST = 5
MS = 1e3


@dataclass(frozen=True, slots=True)
class Case:
    """Sixteen rows of one kind.

    Attributes:
        name: what is sampled.
        spread: standard deviation of the logits: at 1 the nucleus of 0.95 has two thirds of all
            tokens, at 4 a few hundred to a few thousand.
        num_with_logprobs: rows that ask for the five best log-probabilities.
    """

    name: str
    params: SamplingParams = field(default=SamplingParams(max_tokens=1, temperature=1.0))
    spread: float = 4.0
    num_with_logprobs: int = 0


HOT = SamplingParams(max_tokens=1, temperature=1.0)
GREEDY = Case("greedy", SamplingParams(max_tokens=1))
CASES = (
    Case("temperature 1"),
    Case("temperature 0.7", replace(HOT, temperature=0.7)),
    Case("top_p 0.95, peaked", replace(HOT, top_p=0.95)),
    Case("top_p 0.95, flat", replace(HOT, top_p=0.95), spread=1.0),
    Case("top_k 50", replace(HOT, top_k=50)),
    Case("top_k 50, top_p 0.95", replace(HOT, top_k=50, top_p=0.95)),
    Case("top_p 0.95, 4 rows with logprobs", replace(HOT, top_p=0.95), num_with_logprobs=4),
)


def batch(case: Case, vocab_size: int) -> tuple[torch.Tensor, list[SamplingParams]]:
    """Logits [rows, vocab_size] and parameters per row."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator) * case.spread
    params = [replace(case.params, seed=row) for row in range(NUM_ROWS)]
    for row in range(case.num_with_logprobs):
        params[row] = replace(params[row], num_logprobs=5)
    return logits, params


def by_sorting(logits: torch.Tensor, params: Sequence[SamplingParams]) -> list[int]:
    """The usual way: every row sorted, what is not kept masked, one exponential per token."""
    scaled = logits / torch.tensor([[max(one.temperature, 1e-5)] for one in params])
    ordered, ids = scaled.sort(-1)
    top_k = torch.tensor([[one.top_k or logits.shape[-1]] for one in params])
    least = ordered.gather(-1, logits.shape[-1] - top_k)
    ordered.masked_fill_(ordered < least, -torch.inf)
    heavier = 1 - ordered.softmax(-1).cumsum(-1)
    outside = heavier >= torch.tensor([[one.top_p] for one in params])
    outside[:, -1] = False
    weights = ordered.masked_fill_(outside, -torch.inf).softmax(-1)
    best = weights.div_(torch.empty_like(weights).exponential_()).argmax(-1, keepdim=True)
    tokens: list[int] = ids.gather(-1, best)[:, 0].tolist()
    return tokens


def least_ms(
    runs: Mapping[str, Callable[[], object]], rounds: int, *, seldom: str, every: int = 8
) -> dict[str, tuple[float, float]]:
    """Least and median CPU time of each, in ms; all take turns, of ``BURST`` calls each.

    Those whose name ends with ``seldom`` take part in one round of ``every``, with a call.
    """
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            rare = name.endswith(seldom)
            for _ in range(BURST if not rare else number % every == 0):
                begin = time.process_time()
                run()
                spent[name].append((time.process_time() - begin) * MS)
    return {name: (min(one), statistics.median(one)) for name, one in spent.items()}
