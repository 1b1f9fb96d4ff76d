"""Draw a token per row from softmax(logits / temperature), cut to ``top_k``, ``min_p``, ``top_p``.

No row is sorted. A token is drawn from all that are left, by inverting the distribution function in
the order of token ids. It stands if it is in the nucleus: if those heavier than it have less than
``top_p`` together. Otherwise the whole nucleus is heavier than it, and the next one is drawn from
those heavier ones, with the next number. What stands is distributed as if the nucleus had been
known (rejection sampling from ever smaller supersets); that takes 1 + ln(1 / top_p) draws on
average, and each refused one leaves fewer tokens. Tokens as good as the last one that is kept are
kept as well, so no order among equals matters.
"""

import hashlib
from collections.abc import Sequence

import torch

from disagg.messages.sampling import SamplingParams
from disagg.workers.engines.best_tokens import BLOCK, best_tokens, in_blocks

EXP_MIN, EXP_MAX = -40.0, 60.0
"""A row whose best logit lies between them is weighed as it is; others are shifted first."""
CACHED = 1 << 16
"""Weights that are compared in one go on a CPU: 256 KiB."""
NUM_SPARE = 16
"""Tokens looked at beyond the ``top_k`` best, so that those as good as the last are among them."""


def uniform(seed: int, position: int, attempt: int = 0) -> float:
    """Return the number in [0, 1) that decides the token at ``position``.

    Counter-based: any worker gets the same one without knowing what was drawn before.
    """
    counters = f"{seed}:{position}:{attempt}" if attempt else f"{seed}:{position}"
    digest = hashlib.blake2b(counters.encode(), digest_size=8, person=b"disagg.sample")
    return (int.from_bytes(digest.digest(), "little") >> 11) / (1 << 53)


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    """Token [rows] drawn in each row.

    Args:
        logits: [rows, vocab_size], float32 and finite; kept as they are.
        params: per row, with a temperature above 0.
        positions: per row the absolute index of the token.
    """
    vocab_size = logits.shape[-1]
    cut = [row for row, param in enumerate(params) if 0 < param.top_k < vocab_size]
    if not cut:
        return _draw(_weights(logits, params), params, positions)
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    among_all = [row for row in range(len(params)) if not 0 < params[row].top_k < vocab_size]
    top_k = torch.tensor([[params[row].top_k] for row in cut], device=logits.device)
    num_best = min(int(top_k.max()) + NUM_SPARE, vocab_size)
    best, ids = best_tokens(some_rows(logits, cut), num_best)
    least = best.gather(-1, top_k - 1)
    # Where the last of a row's own spare ones is as good as the last kept, more may be.
    worst = best.gather(-1, (top_k - 1 + NUM_SPARE).clamp(max=num_best - 1))
    complete = (worst < least)[:, 0].tolist()
    few = [at for at, is_complete in enumerate(complete) if is_complete]
    if few:
        rows = [cut[at] for at in few]
        own = [params[row] for row in rows]
        in_order, order = some_rows(ids, few).sort(-1)
        kept = some_rows(best.masked_fill_(best < least, -torch.inf), few).gather(-1, order)
        # How many others lie between depends on the other rows, and with it the order of the sums:
        # in float64 no draw can tell.
        kept = kept.double()
        drawn = _draw(_weights(kept, own), own, [positions[row] for row in rows])
        tokens[rows] = in_order.gather(-1, drawn[:, None])[:, 0]
    many = [at for at, is_complete in enumerate(complete) if not is_complete]
    if many:
        rows = [cut[at] for at in many]
        own = [params[row] for row in rows]
        kept = some_rows(logits, rows)
        weights = _weights(kept, own)
        weights[:, :vocab_size].mul_(kept >= some_rows(least, many))
        tokens[rows] = _draw(weights, own, [positions[row] for row in rows])
    if among_all:
        own = [params[row] for row in among_all]
        weights = _weights(some_rows(logits, among_all), own)
        tokens[among_all] = _draw(weights, own, [positions[row] for row in among_all])
    return tokens


def _weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """exp(logits / temperature) [rows, tokens], each row up to a factor of its own."""
    scaled = logits
    if any(param.temperature != 1 for param in params):
        scale = torch.tensor([[1 / param.temperature] for param in params], device=logits.device)
        scaled = logits * scale
    scaled = in_blocks(scaled).flatten(1)
    best = scaled.amax(-1, keepdim=True)
    fits = (best > EXP_MIN) & (best < EXP_MAX)
    if not bool(fits.all()):
        return (scaled - best.masked_fill_(fits, 0)).exp_()  # by nothing where a row fits
    # A second tensor of this size makes the allocator give memory back and take it anew.
    return scaled.exp() if scaled.data_ptr() == logits.data_ptr() else scaled.exp_()


def _draw(
    weights: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    """Index [rows] drawn by weight [rows, whole blocks], cut to ``min_p`` and ``top_p``."""
    device = weights.device
    if any(param.min_p > 0 for param in params):
        share = torch.tensor([[param.min_p] for param in params], device=device)
        least = weights.amax(-1, keepdim=True) * share
        weights.mul_(torch.ge(weights, least, out=torch.empty_like(weights)))
    weights = weights.view(len(params), -1, BLOCK)
    sums = weights.sum(-1).double()
    mass = sums.sum(-1)
    tokens = torch.empty(len(params), dtype=torch.int64, device=device)
    rows, attempt = list(range(len(params))), 0
    while rows:
        drawn = _invert(
            weights, sums, [uniform(params[row].seed, positions[row], attempt) for row in rows]
        )
        tokens[rows] = drawn
        limited = [at for at, row in enumerate(rows) if params[row].top_p < 1]
        if not limited:
            break
        own = weights.flatten(1).gather(-1, drawn[:, None])
        above = _mass_above(some_rows(weights, limited), some_rows(own, limited))
        shares = (above / some_rows(mass, limited)).tolist()
        again = [
            at for at, share in zip(limited, shares, strict=True) if share >= params[rows[at]].top_p
        ]
        rows = [rows[at] for at in again]
        if rows:
            weights = some_rows(weights, again)
            weights = weights * (weights > some_rows(own, again)[..., None])
            sums, mass = weights.sum(-1).double(), some_rows(mass, again)
        attempt += 1
    return tokens


def _mass_above(weights: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Sum [rows] of the weights [rows, blocks, BLOCK] that are above a row's own [rows, 1].

    On a CPU it goes by parts of the vocabulary, so that what is written stays in the cache.
    """
    size = weights.shape[1]
    if weights.device.type == "cpu":
        size = max(1, CACHED // weights[:, 0].numel())
    masses = []
    for start in range(0, weights.shape[1], size):
        part = weights[:, start : start + size]
        # A mask of floats: one of bools takes twice as long to make and to apply.
        mask = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        masses.append(torch.gt(part, own[..., None], out=mask).mul_(part).sum(-1))
    # Block by block, so that the sum does not depend on how many rows there are.
    return torch.cat(masses, 1).sum(-1, dtype=torch.float64)


def some_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows, ascending; nothing is copied where it is all of them."""
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, torch.tensor(rows, dtype=torch.int64, device=tensor.device))


def _invert(weights: torch.Tensor, sums: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """Index [rows] at which the running sum exceeds a share of its end; never one of weight 0.

    Args:
        weights: [rows, blocks, BLOCK].
        sums: [rows, blocks], float64.
        numbers: per row the share, in [0, 1).
    """
    share = torch.tensor([[number] for number in numbers], dtype=sums.dtype, device=sums.device)
    total = sums.cumsum(-1)
    target = total[:, -1:] * share
    block = _first_above(total, target)
    before = total.gather(-1, block) - sums.gather(-1, block)
    row = torch.arange(len(weights), device=weights.device)
    inside = weights[row, block[:, 0]].double().cumsum(-1)
    return (block * BLOCK + _first_above(inside, target - before))[:, 0]


def _first_above(total: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # Rounding may put the target above the end: the last one that adds something then.
    last = torch.searchsorted(total, total[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(total, target, right=True), last)
