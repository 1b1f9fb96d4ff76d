"""Llama-4's temperature tuning, by the positions of the tokens.

Its layers without RoPE scale queries by their position. They count it from the length of the
cache, as if the packed batch were one sequence; position ids do not reach them. In place of a
cache each such layer gets an object that answers this one question for every token.
"""

from typing import Any

import torch

from disagg.workers.engines.native.attention import BATCH_ARGUMENT
from disagg.workers.engines.native.packed_batch import PackedBatch


class OwnPositions:
    """Stands where a layer expects a cache: lengths per token, nothing kept."""

    def __init__(self, positions: torch.Tensor) -> None:
        """Take the positions [T] of the packed tokens."""
        self._lengths = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_index: int) -> torch.Tensor:
        """Return what the layer must add to a token's packed row to get its position, [T]."""
        return self._lengths

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values alone: attention reads older ones from the pool."""
        return key, value


def scale_by_own_positions(model: torch.nn.Module) -> None:
    """Tell the attention modules that count positions themselves those of the tokens."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False):
            module.register_forward_pre_hook(_give_positions, with_kwargs=True)


def _give_positions(
    module: object, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch: PackedBatch = keywords[BATCH_ARGUMENT]
    return arguments, keywords | {"past_key_values": OwnPositions(batch.positions[0])}
