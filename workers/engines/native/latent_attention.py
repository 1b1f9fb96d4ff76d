"""MLA: the pool keeps what the layer caches, a latent and a rotary key per token.

The attention modules of these families compute both, then call their own ``expand_kv``, which
projects them to the K and V of all heads. Here the call hands both on as they are: `attention`
writes them where K and V of other families go, and projects what it gathers, old tokens and new.
"""

from collections.abc import Iterable
from typing import Any

import torch


def hand_out_latents(model: torch.nn.Module) -> None:
    """Make the model's attention modules pass latents to attention instead of K and V."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "expand_kv"):
            module.expand_kv = _as_they_are


def expand_latents(module: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Project ``latents`` [S, 1, keys, latent] to K and V [S, num_heads, keys, size]."""
    rank = module.kv_lora_rank
    keys, values = type(module).expand_kv(module, latents[..., :rank], latents[..., rank:])
    return keys, values


def _as_they_are(
    latent: torch.Tensor, rotary_key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, rotary_key
