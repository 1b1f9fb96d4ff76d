"""MLA: the pool keeps what the layer caches, a latent and a rotary key per token.

The attention modules of these families compute both, then call their own ``expand_kv``, which
projects them to the K and V of all heads. Here the call hands both on as they are: `attention`
writes them where K and V of other families go.

Many queries of one sequence, as in a chunk of a prompt, attend over the K and V of what was
gathered: ``keys * rank * heads * (key size + value size)`` products, shared by all of them. For one
query, as in decoding, the projection is absorbed: as ``q (W c) = (q W) c`` the query is projected
to a latent instead of each key, and the weighted sum of latents to a value:
``keys * heads * (2 * rank + rotary size)`` products, a hundredth of it with DeepSeek's sizes. The
price is a second copy of this projection's weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """Both halves of a layer's projection from latents, by head.

    Attributes:
        to_keys: [num_heads, key size without the rotary part, rank].
        to_values: [num_heads, rank, value size].
    """

    to_keys: torch.Tensor
    to_values: torch.Tensor

    def absorb(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries [S, num_heads, 1, key size] as those of one head [S, 1, num_heads, latent]."""
        size = self.to_keys.shape[1]
        in_latents = torch.matmul(queries[..., :size], self.to_keys)
        return torch.cat((in_latents, queries[..., size:]), dim=-1).transpose(1, 2)

    def values_of(self, latents: torch.Tensor) -> torch.Tensor:
        """What attention found [S, 1, num_heads, rank] as values [S, num_heads, 1, size]."""
        return torch.matmul(latents.transpose(1, 2), self.to_values)


def hand_out_latents(model: torch.nn.Module) -> None:
    """Make the model's attention modules pass latents to attention instead of K and V.

    Each gets its ``latent_projection``.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "expand_kv"):
            module.latent_projection = _projection_of(module)
            module.expand_kv = _as_they_are


def expand_latents(module: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Project ``latents`` [S, 1, keys, latent] to K and V [S, num_heads, keys, size]."""
    rank = module.kv_lora_rank
    keys, values = type(module).expand_kv(module, latents[..., :rank], latents[..., rank:])
    return keys, values


def _projection_of(module: Any) -> LatentProjection:
    """What the module's own projection makes of the latents of an identity matrix."""
    rank, rotary = module.kv_lora_rank, module.qk_rope_head_dim
    weight = module.kv_b_proj.weight
    latents = weight.new_zeros(1, 1, rank, rank + rotary)
    latents[0, 0, :, :rank].fill_diagonal_(1)
    keys, values = expand_latents(module, latents)
    to_keys = keys[0, :, :, : module.qk_nope_head_dim].transpose(1, 2)
    return LatentProjection(to_keys.contiguous(), values[0].contiguous())


def _as_they_are(
    latent: torch.Tensor, rotary_key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, rotary_key
