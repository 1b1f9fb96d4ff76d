"""Draw a token per row from softmax(logits / temperature), cut to ``top_k`` and ``top_p``.

What is kept is decided among the best few hundred tokens of a row; a row whose nucleus is larger
than those (a flat distribution) is sorted. Tokens as good as the last one kept are kept as well,
so no order among equals matters; the distribution function is inverted in the order of token ids.
Sums go over blocks of neighbouring tokens first, as running sums over a vocabulary are slow.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from disagg.messages.sampling import SamplingParams

BLOCK = 64
"""Neighbouring tokens that are summed up, and whose best is found, in one go."""
NUM_CANDIDATES = 256
"""The best tokens of a row that are looked at first; also the number of blocks they come from."""


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> torch.Tensor:
    """Token [rows] at which the distribution function exceeds the row's number in [0, 1).

    Args:
        logits: [rows, vocab_size], float32 and finite; kept as they are.
        params: per row, with a temperature above 0.
        numbers: per row.
    """
    device = logits.device
    scale = torch.tensor([[1 / param.temperature] for param in params], device=device)
    number = torch.tensor([[n] for n in numbers], dtype=torch.float64, device=device)
    blocks = _in_blocks(logits.sub(logits.amax(-1, keepdim=True)).mul_(scale))
    weights = blocks.exp()
    tokens = torch.empty(len(params), dtype=torch.int64, device=device)
    cut = [row for row, param in enumerate(params) if param.top_k or param.top_p < 1]
    among_all = [row for row in range(len(params)) if row not in cut]
    if cut:
        limits = [params[row] for row in cut]
        mass = _some(weights, cut).sum(-1).sum(-1, keepdim=True, dtype=torch.float64)
        best, ids = _best(_some(blocks, cut))
        least, known = _least_kept(best, limits, mass, logits.shape[-1])
        quick = [at for at, is_known in enumerate(known) if is_known]
        if quick:
            rows = [cut[at] for at in quick]
            tokens[rows] = _draw_among(best[quick], ids[quick], least[quick], number[rows])
        flat = [at for at, is_known in enumerate(known) if not is_known]
        if flat:
            rows = [cut[at] for at in flat]
            ordered = _sorted(blocks[rows].flatten(1)[:, : logits.shape[-1]])
            limits = [params[row] for row in rows]
            least, _ = _least_kept(ordered, limits, mass[flat], logits.shape[-1])
            weights[rows] *= blocks[rows] >= least[..., None]
            among_all += rows
    if among_all:
        among_all.sort()
        chosen = _some(weights, among_all)
        sums = _sums(chosen)
        target = number[among_all] * sums.sum(-1, keepdim=True)
        tokens[among_all] = _index(chosen, sums, target, right=True)[:, 0]
    return tokens


def _some(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows, ascending; nothing is copied where it is all of them."""
    return tensor if len(rows) == len(tensor) else tensor[rows]


def _in_blocks(scaled: torch.Tensor) -> torch.Tensor:
    """Turn [rows, tokens] into [rows, blocks, BLOCK]; what is added has no weight."""
    padded: torch.Tensor = pad(scaled, (0, -scaled.shape[-1] % BLOCK), value=-torch.inf)
    return padded.view(len(scaled), -1, BLOCK)


def _sums(weights: torch.Tensor) -> torch.Tensor:
    return weights.sum(-1).double()


def _index(
    weights: torch.Tensor, sums: torch.Tensor, target: torch.Tensor, *, right: bool
) -> torch.Tensor:
    """Index [rows, 1] at which the running sum of weights [rows, blocks, BLOCK] reaches a target.

    ``right``: at which it exceeds it. Never an index that adds nothing to the sum.
    """
    total = sums.cumsum(-1)
    block = _first(total, target, right=right)
    before = total.gather(-1, block) - sums.gather(-1, block)
    inside = weights.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)
    return block * BLOCK + _first(inside, target - before, right=right)


def _first(total: torch.Tensor, target: torch.Tensor, *, right: bool) -> torch.Tensor:
    last = torch.searchsorted(total, total[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(total, target, right=right), last)


def _draw_among(
    best: torch.Tensor, ids: torch.Tensor, least: torch.Tensor, number: torch.Tensor
) -> torch.Tensor:
    """Draw among the candidates [rows, candidates] that are kept."""
    ids, order = ids.sort(-1)
    scaled = best.gather(-1, order)
    total = scaled.exp().double().masked_fill_(scaled < least, 0).cumsum(-1)
    return ids.gather(-1, _first(total, number * total[:, -1:], right=True))[:, 0]


def _best(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best tokens of each row, best first: logits and ids [rows, candidates].

    They lie in the blocks whose own best are the best of all.
    """
    which = blocks.amax(-1).topk(min(NUM_CANDIDATES, blocks.shape[1]), sorted=False).indices
    inside = blocks.gather(1, which[..., None].expand(-1, -1, BLOCK)).flatten(1)
    best, at = inside.topk(min(NUM_CANDIDATES, inside.shape[1]))
    return best, which.gather(1, at // BLOCK) * BLOCK + at % BLOCK


def _sorted(scaled: torch.Tensor) -> torch.Tensor:
    """Sort rows, best first. On CPUs numpy is 25 times faster at this than torch."""
    if scaled.device.type != "cpu":
        return scaled.sort(descending=True).values
    return torch.from_numpy(np.sort(scaled.neg().numpy())).neg_()


def _least_kept(
    best: torch.Tensor, limits: Sequence[SamplingParams], mass: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, list[bool]]:
    """Return the least scaled logit [rows, 1] that is kept, and per row whether it is known.

    Args:
        best: the best of each row, best first.
        limits: per row.
        mass: [rows, 1] weight of all tokens.
        num_tokens: size of the vocabulary.
    """
    device, num_best = best.device, best.shape[-1]
    top_p = torch.tensor(
        [[param.top_p if param.top_p < 1 else torch.inf] for param in limits],
        dtype=torch.float64,
        device=device,
    )
    top_k = torch.tensor([[param.top_k or num_tokens] for param in limits], device=device)
    limited = top_k < num_tokens
    lowest = best.gather(-1, top_k.clamp(max=num_best) - 1).masked_fill_(~limited, -torch.inf)
    weights = _in_blocks(best).exp()
    of_top_k = weights * (_in_blocks(best) >= lowest[..., None])
    needed = top_p * torch.where(limited, _sums(of_top_k).sum(-1, keepdim=True), mass)
    last = _index(weights, _sums(weights), needed, right=False)
    least = torch.maximum(best.gather(-1, last), lowest)
    # Tokens as good as the last candidate may be missing among the candidates.
    known = torch.where(limited, lowest, least) > best[:, -1:]
    return least, [num_best >= num_tokens or sure for sure in known[:, 0].tolist()]
