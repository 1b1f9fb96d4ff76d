"""Choose the next token from logits; randomness is a function of seed and position alone."""

import hashlib
from collections.abc import Sequence

import torch

from disagg.messages.sampling import SampledToken, SamplingParams, TokenLogprobs


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
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteError("logits are not finite")
    tokens: list[int] = logits.argmax(-1).tolist()
    samples = []
    for row, (param, position) in enumerate(zip(params, positions, strict=True)):
        token = tokens[row]
        if param.temperature > 0:
            token = _draw(logits[row], param, uniform(param.seed, position))
        samples.append(SampledToken(token, _logprobs(logits[row], token, param.num_logprobs)))
    return samples


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that decides the token at ``position``.

    Counter-based: any worker gets the same one without knowing what was drawn before.
    """
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8, person=b"disagg.sample")
    return (int.from_bytes(digest.digest(), "little") >> 11) / (1 << 53)


def _draw(logits: torch.Tensor, param: SamplingParams, number: float) -> int:
    """Invert the distribution function, tokens in descending order of probability.

    Temperature first, then the ``top_k`` best, of these the fewest that reach ``top_p``.
    """
    scaled, order = logits.double().sort(descending=True, stable=True)
    if param.top_k:
        scaled, order = scaled[: param.top_k], order[: param.top_k]
    total = ((scaled - scaled[0]) / param.temperature).softmax(0).cumsum(0)
    num_kept = int((total < param.top_p).sum()) + 1
    total = total[:num_kept]
    index = int((total <= number * float(total[-1])).sum())
    return int(order[min(index, len(total) - 1)])


def _logprobs(logits: torch.Tensor, token: int, num_logprobs: int | None) -> TokenLogprobs | None:
    if num_logprobs is None:
        return None
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(num_logprobs, len(logprobs)))
    return TokenLogprobs(
        logprob=float(logprobs[token]),
        top=tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
    )
