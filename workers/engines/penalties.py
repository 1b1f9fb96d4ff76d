"""What ``logit_bias``, penalties and ``min_tokens`` change in the logits, before anything is cut.

Definitions and order are vLLM's, those of presence and frequency OpenAI's: the bias is added; then
the logit of every token that occurs in prompt or answer is divided by ``repetition_penalty`` where
it is positive and multiplied by it otherwise; then tokens of the answer lose ``frequency_penalty``
per occurrence and ``presence_penalty`` once. At last no stop token can come before ``min_tokens``.
"""

from collections.abc import Sequence

import numpy as np
import torch

from disagg.messages.sampling import SamplingParams
from disagg.workers.engines.token_history import TokenCounts


def hold_back_stops(
    logits: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Logits [rows, vocab_size], a copy, in which none of the given rows can end its request."""
    size = logits.shape[-1]  # of the checkpoint's own stop tokens some may not be the model's
    entries = [(r, token) for r in rows for token in params[r].stop_token_ids if token < size]
    if not entries:
        return logits
    where, ids = (
        torch.tensor(column, device=logits.device) for column in zip(*entries, strict=True)
    )
    logits = logits.clone()
    logits[where, ids] = -torch.inf
    return logits


def adjust(
    logits: torch.Tensor, params: Sequence[SamplingParams], seen: Sequence[TokenCounts | None]
) -> torch.Tensor:
    """Logits [rows, vocab_size] with bias and penalties; those given where no row has any.

    Args:
        logits: float32; kept as they are.
        params: per row.
        seen: per row what it has penalties for, if it has any.
    """
    penalised = [(row, counts) for row, counts in enumerate(seen) if counts is not None]
    biased = [row for row, param in enumerate(params) if param.logit_bias]
    if not penalised and not biased:
        return logits
    logits = logits.clone()
    device = logits.device
    if biased:
        entries = [(row, token, bias) for row in biased for token, bias in params[row].logit_bias]
        rows, ids, values = (torch.tensor(column) for column in zip(*entries, strict=True))
        place = (rows.to(device), ids.to(device))
        logits[place] += values.to(logits)
    if penalised:
        sizes = [len(counts.token_ids) for _, counts in penalised]

        def spread(values: Sequence[float]) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(device)

        own = [params[row] for row, _ in penalised]
        ids = torch.from_numpy(np.concatenate([counts.token_ids for _, counts in penalised]))
        place = (spread([row for row, _ in penalised]).long(), ids.to(device))
        number = torch.from_numpy(np.concatenate([counts.counts for _, counts in penalised]))
        number = number.to(logits)
        repetition = spread([param.repetition_penalty for param in own])
        values = logits[place]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= number * spread([param.frequency_penalty for param in own])
        values -= (number > 0) * spread([param.presence_penalty for param in own])
        logits[place] = values
    return logits
