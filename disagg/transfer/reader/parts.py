"""What is read of each block of an owner whose blocks are larger or smaller than the reader's.

Both count blocks of their own size. The owner offers what a query at the boundary reads, in its
blocks: at the beginning it may offer more than is lacked, and where its blocks are smaller, fewer
tokens than the reader's first block of a window has. Nothing that is seen from the boundary on is
ever missing; what the first block has before that stays unknown, so it must not be published.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from disagg.kv.kinds.manager import GroupManager
from disagg.kv.transfer_plan import Blocks
from disagg.transfer.read_plan import GroupReads, ReadPlan


@dataclass(frozen=True, slots=True)
class Part:
    """A part of one of the owner's blocks, and where it goes."""

    block_index: int
    """Of the destination, in the reader's table."""
    block: int
    """Id of the destination."""
    pair: int
    """Which part: number of a pair in the group's `GroupReads.pairs`."""


@dataclass(frozen=True, slots=True)
class Parts:
    """One transfer's parts.

    Attributes:
        by_block: per group, what is read of the block with each of the owner's indexes.
        surplus: per group, indexes of blocks that are offered and of which nothing is read.
        unfilled: per group, so many leading entries of the reader's table are not to be published;
            0 where all that is read fills its blocks.
    """

    by_block: tuple[dict[int, tuple[Part, ...]], ...]
    surplus: tuple[frozenset[int], ...]
    unfilled: tuple[int, ...]

    @property
    def num_parts(self) -> int:
        """How many are read in all."""
        return sum(len(parts) for blocks in self.by_block for parts in blocks.values())


def parts_of(
    plan: ReadPlan,
    managers: Sequence[GroupManager],
    num_tokens: int,
    lacks: Blocks,
    first_lacked: Sequence[int],
) -> Parts:
    """What a transfer up to position ``num_tokens`` reads.

    Args:
        plan: from the two contracts.
        managers: the reader's, one per group.
        num_tokens: the boundary.
        lacks: the reader's destinations.
        first_lacked: positions from which on the owner was requested to offer.
    """
    found = [
        _group_parts(*one, num_tokens)
        for one in zip(plan.groups, managers, lacks, first_lacked, strict=True)
    ]
    by_block, surplus, unfilled = zip(*found, strict=True)
    return Parts(by_block, surplus, unfilled)


def _group_parts(
    reads: GroupReads,
    manager: GroupManager,
    lacks: Sequence[tuple[int, int]],
    first_lacked: int,
    num_tokens: int,
) -> tuple[dict[int, tuple[Part, ...]], frozenset[int], int]:
    into: dict[int, list[tuple[int, int]]] = defaultdict(list)
    """Per block of a cell at the reader: the owner's block, and the number of the pair."""
    for number, (at, to) in enumerate(reads.pairs):
        into[to].append((at, number))
    seen_from = manager.skipped_tokens(num_tokens)
    end = -(-num_tokens // reads.block_tokens) if seen_from < num_tokens else 0
    if reads.is_state:  # the one at the boundary, whatever its index on either side
        first, end = (end - 1) * reads.src_blocks, end * reads.src_blocks
        own_first = manager.first_block(num_tokens)
    else:
        first = max(seen_from, first_lacked) // reads.block_tokens
        own_first = 0
    found: dict[int, list[Part]] = defaultdict(list)
    unfilled = 0
    for block_index, block in lacks:
        cell, to = divmod(block_index - own_first, reads.dst_blocks)
        start = first if reads.is_state else cell * reads.src_blocks
        for at, number in into[to]:
            if start + at < first:
                unfilled = max(unfilled, block_index + 1)
            elif start + at < end:
                found[start + at].append(Part(block_index, block, number))
    by_block = {index: tuple(parts) for index, parts in found.items()}
    return by_block, frozenset(range(first, end)) - by_block.keys(), unfilled
