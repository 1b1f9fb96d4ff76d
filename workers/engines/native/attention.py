"""The attention function that transformers' models call: write to the pool, read through tables."""

from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from disagg.workers.engines.native.latent_attention import LatentProjection, expand_latents
from disagg.workers.engines.native.packed_batch import (
    DecodeBucket,
    GroupBatch,
    PackedBatch,
    PrefillTile,
)
from disagg.workers.engines.native.paged_pool import LayerCache

ATTENTION_NAME = "disagg_paged"
BATCH_ARGUMENT = "disagg_batch"
"""The keyword of ``model.forward`` that carries the step's PackedBatch."""

HARMLESS_ARGUMENTS = frozenset({"output_router_logits", "position_ids", "use_cache"})
"""What models pass beside the named arguments without meaning anything to attention here.

Positions were already applied by RoPE, which keys a query sees follows from the batch, the cache
of transformers is never needed, and reporting expert choices changes no output.
"""

_NOT_PASSED = object()


class AttentionArgumentError(TypeError):
    """A model passed what this attention does not implement; ignoring it would be a wrong model."""


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: object = _NOT_PASSED,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    disagg_batch: PackedBatch | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attend over a packed batch through the paged pool.

    Writes the new keys and values into their pool slots first, so that the queries read them from
    there like any older token.

    Args:
        module: the attention layer; its ``layer_idx`` names the pool views.
        query: [1, num_heads, T, head_size] after RoPE and norms.
        key: [1, num_kv_heads, T, head_size]; of layers with latents the latent [1, 1, T, size].
        value: like ``key``; of layers with latents the rotary key [1, 1, T, size].
        attention_mask: must be None; the batch defines what each query sees.
        scaling: factor on the scores.
        dropout: must be 0.
        sliding_window: must agree with the layer's spec where a model passes it.
        s_aux: attention sinks [num_heads], or None.
        softcap: bound of the scores' tanh cap, or None.
        disagg_batch: the step.
        **others: only HARMLESS_ARGUMENTS are accepted.

    Returns:
        [1, T, num_heads, size of a value], and no weights.

    Raises:
        AttentionArgumentError: the call means something this function would not compute.
    """
    unknown = sorted(others.keys() - HARMLESS_ARGUMENTS)
    if unknown:
        raise AttentionArgumentError(f"unknown attention arguments {unknown}")
    if disagg_batch is None or attention_mask is not None or dropout or query.shape[0] != 1:
        raise AttentionArgumentError("needs a packed batch, and neither mask nor dropout")
    layer = _layer_cache(module, disagg_batch)
    if sliding_window is _NOT_PASSED:
        sliding_window = None  # a family without windows
    if sliding_window != layer.sliding_window:
        raise AttentionArgumentError(
            f"layer {module.layer_idx}: the model's window is {sliding_window}, "
            f"its spec says {layer.sliding_window}"
        )
    num_heads, num_tokens, head_size = query.shape[1:]
    if not num_tokens == key.shape[2] == disagg_batch.positions.shape[1]:
        raise AttentionArgumentError(f"layer {module.layer_idx}: some tokens were left out")
    group = disagg_batch.groups[layer.group]
    if not layer.is_shared:
        _write(layer, group, key[0], value[0])
    num_kv_heads = num_heads if layer.is_latent else layer.keys.shape[1]
    value_size = module.v_head_dim if layer.is_latent else value.shape[-1]
    # Query heads that share a KV head stay together, so keys need no copy per query head.
    queries = query[0].view(num_kv_heads, num_heads // num_kv_heads, num_tokens, head_size)
    sinks = None if s_aux is None else s_aux.view(num_kv_heads, num_heads // num_kv_heads, 1)
    out = queries.new_empty(*queries.shape[:3], value_size)
    how = scaling, softcap, sinks
    for tile in group.tiles:
        out[:, :, tile.rows] = _attend_tile(module, layer, tile, queries, *how)
    for bucket in group.decodes:
        out[:, :, bucket.rows] = _attend_bucket(module, layer, bucket, queries, *how)
    return out.view(num_heads, num_tokens, -1).transpose(0, 1)[None], None


def register() -> None:
    """Make the function known to transformers; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def _layer_cache(module: torch.nn.Module, batch: PackedBatch) -> LayerCache:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int) or index not in batch.layers:
        raise AttentionArgumentError(f"{type(module).__name__} has layer_idx {index!r}")
    return batch.layers[index]


def _write(layer: LayerCache, group: GroupBatch, key: torch.Tensor, value: torch.Tensor) -> None:
    if layer.is_latent:  # in two parts
        key = torch.cat((key, value), dim=-1)
    else:
        layer.values[group.write_blocks, :, group.write_offsets] = value.transpose(0, 1)
    layer.keys[group.write_blocks, :, group.write_offsets] = key.transpose(0, 1)


def _gather(layer: LayerCache, block_ids: torch.Tensor) -> torch.Tensor:
    """Copy K and V of blocks [S, n]: [2, S, num_kv_heads, n * block_tokens, head_size].

    Of latents there is one instead of two.
    """
    num_heads, block_tokens, head_size = layer.keys.shape[1:]
    planes = 1 if layer.is_latent else 2
    heads = torch.arange(planes * num_heads, device=block_ids.device).view(planes, 1, num_heads, 1)
    first = block_ids * layer.head_pages_per_block + layer.first_head_page
    pages = layer.head_pages.index_select(0, (first[None, :, None] + heads).flatten())
    sequences, num_blocks = block_ids.shape
    return pages.view(planes, sequences, num_heads, num_blocks * block_tokens, head_size)


def _attend_tile(
    module: torch.nn.Module,
    layer: LayerCache,
    tile: PrefillTile,
    queries: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    seen = slice(tile.skip, tile.skip + tile.num_keys)
    pages = _gather(layer, tile.block_ids[None])[:, :, :, seen]
    keys, values = expand_latents(module, pages[0]) if layer.is_latent else pages
    rows = queries[:, :, tile.rows]
    return _softmax_attention(
        rows,
        keys[0, :, None].expand(-1, rows.shape[1], -1, -1),
        values[0, :, None].expand(-1, rows.shape[1], -1, -1),
        tile.mask,
        scaling,
        softcap,
        None if sinks is None else sinks[..., None],
    )


def _attend_bucket(
    module: Any,
    layer: LayerCache,
    bucket: DecodeBucket,
    queries: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    pages = _gather(layer, bucket.block_ids)
    pages.view(-1, pages.shape[-1]).index_fill_(0, bucket.holes, 0)
    rows = queries[:, :, bucket.rows].permute(2, 0, 1, 3)
    how = bucket.mask, scaling, softcap, None if sinks is None else sinks[None]
    if layer.is_latent:
        projection: LatentProjection = module.latent_projection
        values = pages[0, ..., : module.kv_lora_rank]
        found = _softmax_attention(projection.absorb(rows), pages[0], values, *how)
        out = projection.values_of(found)
    else:
        out = _softmax_attention(rows, pages[0], pages[1], *how)
    return out.permute(1, 2, 0, 3)


def _softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over four-dimensional inputs; ``mask`` and ``sinks`` broadcast to the scores."""
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling
        )
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        # A sink takes part in the normalisation and carries no value.
        column = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)
