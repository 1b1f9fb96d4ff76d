"""Log-probabilities: of what was sampled, and of a prompt's own tokens."""

from collections.abc import Callable, Sequence

import torch

from disagg.messages.sampling import TokenLogprobs
from disagg.scheduling.step import SequenceSlice
from disagg.workers.engines.best_tokens import best_tokens
from disagg.workers.engines.finite import check_finite

LOGITS_BYTES_MAX = 32 << 20
"""Of a prompt's logits in float32 that are looked at together; at least one row is."""


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    num_best: Sequence[int],
    *,
    with_ranks: bool = False,
) -> list[TokenLogprobs]:
    """What the model thinks of a token in each row, and of the best ones.

    Args:
        logits: [rows, vocab_size], float32 and finite; spent.
        tokens: [rows].
        num_best: per row, so many of the best tokens; no more than there are.
        with_ranks: count each token's rank.
    """
    counts = [min(number, logits.shape[-1]) for number in num_best]
    own = logits.gather(-1, tokens[:, None])
    ranks = (1 + (logits > own).sum(-1)).tolist() if with_ranks else [0] * len(counts)
    best, ids = best_tokens(logits, max(1, *counts))
    highest = best[:, :1]
    norm = logits.sub_(highest).exp_().sum(-1, keepdim=True).log_().add_(highest)
    own_values, best_values, best_ids = (own - norm).tolist(), (best - norm).tolist(), ids.tolist()
    return [
        TokenLogprobs(
            own_values[row][0],
            tuple(zip(best_ids[row][:count], best_values[row][:count], strict=True)),
            ranks[row],
        )
        for row, count in enumerate(counts)
    ]


def prompt_logprobs(
    part: SequenceSlice,
    first_row: int,
    vocab_size: int,
    logits_of: Callable[[int, int], torch.Tensor],
) -> tuple[TokenLogprobs, ...]:
    """One for each of a slice's ``scored_token_ids``, a few rows of logits at a time.

    Args:
        part: the slice.
        first_row: of its first token in the step that was computed.
        vocab_size: of the model.
        logits_of: logits [rows, vocab_size] behind the rows from one up to another; any float type.

    Raises:
        NonFiniteError: a logit is NaN or infinite.
    """
    size = max(1, LOGITS_BYTES_MAX // (4 * vocab_size))
    found: list[TokenLogprobs] = []
    for low in range(0, len(part.scored_token_ids), size):
        tokens = part.scored_token_ids[low : low + size]
        logits = logits_of(first_row + low, first_row + low + len(tokens)).float()
        check_finite("a logit of the prompt", logits)
        own = torch.tensor(tokens, device=logits.device)
        num_best = [part.num_prompt_logprobs] * len(tokens)
        found += token_logprobs(logits, own, num_best, with_ranks=True)
    return tuple(found)
