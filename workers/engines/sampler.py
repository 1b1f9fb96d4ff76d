"""Choose the next tokens from logits; randomness is a function of seed and position alone.

Every engine samples here, so that a request draws the same tokens wherever it runs. The batch is
handled as a whole, on the logits' device.
"""

import hashlib
from collections.abc import Sequence

import torch

from disagg.messages.sampling import SampledToken, SamplingParams, TokenLogprobs
from disagg.workers.engines.draw import draw


class NonFiniteError(ArithmeticError):
    """The model computed NaN or infinity: it read KV that nobody wrote, or its weights are bad."""


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[SampledToken]:
    """Sample one token per row; a row's outcome does not depend on the other rows.

    Args:
        logits: [rows, vocab_size], any float type.
        params: per row.
        positions: per row the absolute index, in its sequence, of the token being sampled.

    Raises:
        NonFiniteError: a logit is NaN or infinite; nothing may be emitted.
    """
    logits = logits.float()
    # The sum is several times faster; finite numbers may overflow in it, so it only acquits.
    if not bool(logits.sum().isfinite()) and not bool(logits.isfinite().all()):
        raise NonFiniteError("logits are not finite")
    drawn = [row for row, param in enumerate(params) if param.temperature > 0]
    if len(drawn) < len(params):
        tokens = logits.argmax(-1)
    else:
        tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    if drawn:
        tokens[drawn] = draw(
            logits if len(drawn) == len(params) else logits[drawn],
            [params[row] for row in drawn],
            [uniform(params[row].seed, positions[row]) for row in drawn],
        )
    chosen: list[int] = tokens.tolist()
    logprobs = _logprobs(logits, tokens, params)
    return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(chosen)]


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that decides the token at ``position``.

    Counter-based: any worker gets the same one without knowing what was drawn before.
    """
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8, person=b"disagg.sample")
    return (int.from_bytes(digest.digest(), "little") >> 11) / (1 << 53)


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, params: Sequence[SamplingParams]
) -> dict[int, TokenLogprobs]:
    """Log-probabilities of the rows that ask for them, by row; all in one call."""
    rows = [row for row, param in enumerate(params) if param.num_logprobs is not None]
    if not rows:
        return {}
    num_best = [min(params[row].num_logprobs or 0, logits.shape[-1]) for row in rows]
    asked = logits if len(rows) == len(params) else logits[rows]
    norm = asked.logsumexp(-1, keepdim=True)
    own = (asked.gather(-1, tokens[rows, None]) - norm)[:, 0].tolist()
    best = asked.topk(max(num_best))
    values, ids = (best.values - norm).tolist(), best.indices.tolist()
    return {
        row: TokenLogprobs(own[i], tuple(zip(ids[i][:n], values[i][:n], strict=True)))
        for i, (row, n) in enumerate(zip(rows, num_best, strict=True))
    }
