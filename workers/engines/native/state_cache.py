"""Linear states in the paged pool, and the copy of them that a mixer's call works on."""

from dataclasses import dataclass
from math import gcd, prod

import torch

from disagg.kv.shapes.layout import KVCacheLayout

_WIDE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Types to copy bytes with, by width."""


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """One tensor of one layer's state, in the blocks of every state.

    Attributes:
        shape: of one sequence's.
        dtype: of its elements.
        pieces: for each part of it the block, counted within the state, and the view
            [num_blocks, elements] of that part of every block of the pool.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[int, torch.Tensor], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """Copy it out of states, given as block ids [S, blocks_per_state]: [S, *shape]."""
        parts = [
            view.index_select(0, states[:, block]).view(torch.int8) for block, view in self.pieces
        ]
        raw = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return raw.view(self.dtype).view(len(states), *self.shape)

    def write(self, states: torch.Tensor, values: torch.Tensor) -> None:
        """Copy ``values`` [S, *shape] into states, given as block ids [S, blocks_per_state]."""
        raw = values.to(self.dtype).reshape(len(states), -1).contiguous().view(torch.int8)
        first = 0
        for block, view in self.pieces:
            end = first + view.shape[1] * view.dtype.itemsize
            part = raw[:, first:end].contiguous().view(view.dtype)
            view.index_copy_(0, states[:, block], part)
            first = end


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a mixer keeps of one sequence.

    Attributes:
        conv: channels, and inputs that a convolution looks back at.
        recurrent: shape of the recurrent state, in float32; None where there is none.
    """

    conv: tuple[int, int]
    recurrent: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """Where one layer's states lie.

    Attributes:
        group: index of the layer's KV cache group.
        conv: the last inputs of the convolution, oldest first.
        recurrent: the recurrent state, None where the layer has none.
    """

    group: int
    conv: StateTensor
    recurrent: StateTensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of one state."""
        return self.conv.num_bytes + (self.recurrent.num_bytes if self.recurrent else 0)


def place_states(
    layout: KVCacheLayout,
    pool: torch.Tensor,
    layer: int,
    shape: StateShape,
    dtype: torch.dtype,
) -> LayerStates:
    """Find a layer's states in the pool [num_blocks, block_bytes]: the recurrent one comes first.

    ``dtype`` is that of the convolution's inputs.
    """
    group, first = layout.group_of(layer), layout.page_offset(layer)
    useful = layout.useful_bytes(group)
    recurrent = None
    if shape.recurrent is not None:
        recurrent = _place(pool, useful, first, shape.recurrent, torch.float32)
        first += recurrent.num_bytes
    return LayerStates(group, _place(pool, useful, first, shape.conv, dtype), recurrent)


def _place(
    pool: torch.Tensor, useful: int, first: int, shape: tuple[int, ...], dtype: torch.dtype
) -> StateTensor:
    """The tensor that begins at byte ``first`` of a state, whose blocks carry ``useful`` each."""
    last = first + prod(shape) * dtype.itemsize
    pieces = []
    while first < last:
        block, start = divmod(first, useful)
        end = min(useful, start + last - first)
        width = gcd(8, pool.shape[1], start, end)
        wide = pool.view(_WIDE[width])[:, start // width : end // width]
        pieces.append((block, wide))
        first += end - start
    return StateTensor(shape, dtype, tuple(pieces))


class CallStates:
    """The states of one call's sequences, as a mixer asks transformers' ``Cache`` for them.

    Some kernels change what they were given instead of calling an update: after the call the
    attributes hold the new states either way. A state of zeros equals none.

    Attributes:
        conv: [S, channels, inputs].
        recurrent: [S, ...], None where the layer has none.
    """

    def __init__(self, layer_idx: int, conv: torch.Tensor, recurrent: torch.Tensor | None) -> None:
        self._layer_idx = layer_idx
        self.conv = conv
        self.recurrent = recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """The inputs before the call's."""
        self._check(layer_idx, state_idx)
        return self.conv

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Take the call's inputs; returns those before them and them."""
        self._check(layer_idx, state_idx)
        full = torch.cat((self.conv, conv_states.to(self.conv.dtype)), -1)
        self.conv = full[..., -self.conv.shape[-1] :]
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The recurrent states before the call."""
        self._check(layer_idx, state_idx)
        return self.recurrent

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Take the recurrent states after the call."""
        self._check(layer_idx, state_idx)
        if self.recurrent is None:
            raise ValueError("a recurrent state where the layer was said to have none")
        self.recurrent = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: nothing is taken back."""
        self._check(layer_idx, 0)
        return False

    def _check(self, layer_idx: int, state_idx: int) -> None:
        if (layer_idx, state_idx) != (self._layer_idx, 0):
            raise ValueError(f"state {state_idx} of layer {layer_idx} is not in this call")
