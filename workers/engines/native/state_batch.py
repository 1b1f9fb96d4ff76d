"""A step's calls of the mixers: which packed rows, from which states, into which states."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.scheduling.step import SequenceSlice

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StateGroup:
    """What of a group's layout decides where its states lie."""

    block_tokens: int
    blocks_per_state: int


@dataclass(frozen=True, slots=True, eq=False)
class StateCall:
    """One call of every mixer of a group, over sequences with equally many new tokens.

    Attributes:
        rows: the packed rows, sequence after sequence.
        before: [S, blocks_per_state] block ids of the states that the sequences start from; of
            those that start from nothing, any.
        fresh: indices of the sequences that start from nothing.
        after: [S, blocks_per_state] block ids of the states that they leave; may be ``before``.
    """

    rows: torch.Tensor
    before: torch.Tensor
    fresh: torch.Tensor
    after: torch.Tensor

    @property
    def continues(self) -> bool:
        """Whether a sequence starts from a state."""
        return len(self.fresh) < len(self.before)


def state_calls(
    number: int,
    group: StateGroup,
    slices: Sequence[SequenceSlice],
    tables: "Sequence[array[int]]",
    first_rows: Sequence[int],
    tensor: Callable[[npt.NDArray[np.generic]], torch.Tensor],
) -> tuple[tuple[StateCall, ...], Ints]:
    """Lay out the calls of one group: all single tokens in one, every other slice in its own.

    A slice starts from the state at its start and leaves the one at its end; the state after
    position ``p`` stands where ``p``'s block would.

    Returns:
        The calls, and the blocks they write.

    Raises:
        ValueError: a state that is read or written is null, or not in the table.
    """
    before, after = [], []
    for index, part in enumerate(slices):
        where = f"slice {index}, group {number}"
        after.append(_state(tables[index], group, part.start + len(part.token_ids), where))
        before.append(_state(tables[index], group, part.start, where) if part.start else after[-1])
    singles = [index for index, part in enumerate(slices) if len(part.token_ids) == 1]
    parts = [[index] for index, part in enumerate(slices) if len(part.token_ids) > 1]
    calls = tuple(
        StateCall(
            rows=tensor(
                np.concatenate(
                    [np.arange(len(slices[index].token_ids)) + first_rows[index] for index in part]
                )
            ),
            before=tensor(np.stack([before[index] for index in part])),
            fresh=tensor(
                np.array([at for at, index in enumerate(part) if not slices[index].start], np.int64)
            ),
            after=tensor(np.stack([after[index] for index in part])),
        )
        for part in [*([singles] if singles else []), *parts]
    )
    return calls, np.concatenate(after)


def _state(table: "array[int]", group: StateGroup, num_tokens: int, where: str) -> Ints:
    """Blocks of the state after ``num_tokens`` tokens."""
    first = (num_tokens - 1) // group.block_tokens * group.blocks_per_state
    blocks = np.array(table[first : first + group.blocks_per_state], dtype=np.int64)
    if len(blocks) < group.blocks_per_state:
        raise ValueError(f"{where}: the block table ends before the state at {num_tokens}")
    if not blocks.all():
        at = first + int(np.argmin(blocks != NULL_BLOCK))
        raise ValueError(f"{where}: null block at block index {at} of the state at {num_tokens}")
    return blocks
