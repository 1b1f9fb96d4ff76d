"""Which blocks move in a transfer: one computation for both sides of it.

A query at position ``n``, the end of the prompt, reads all blocks of a full-attention group, and
of another kind those from ``spec.first_seen(n)`` on (`disagg/kv/kinds/`). For a sliding window of
``W`` tokens in blocks of ``B`` tokens these are the block indexes ``max(0, n - W + 1) // B`` to
``(n - 1) // B``.

Of these move the ones that the reader lacks: it names the first token it lacks in each group
(`first_lacked`; its blocks may be larger or smaller than the owner's), and the owner offers what is
read from the block of that token on (`first_blocks`, `moved_blocks`), full-attention
blocks as soon as they are complete (`complete_blocks`), everything else with the seal. At a
hand-over the reader counts as its own what its cache has of kinds that see everything; windows and
states move whole, as only the run that ends at ``n`` would be of use. A prefix pull counts hits of
all kinds.
"""

from collections.abc import Hashable, Sequence

from disagg.kv.blocks.hits import CacheHit, ExternalReservation
from disagg.kv.kinds.manager import GroupManager

Blocks = tuple[tuple[tuple[int, int], ...], ...]
"""Per group: (block index, block id) pairs."""


def moved_blocks(
    managers: Sequence[GroupManager], key: Hashable, num_tokens: int, first: Sequence[int]
) -> Blocks:
    """Per group, what a query at position ``num_tokens`` reads from block index ``first`` on."""
    return tuple(
        tuple(pair for pair in manager.in_window_blocks(key, num_tokens) if pair[0] >= start)
        for manager, start in zip(managers, first, strict=True)
    )


def reservation_of(
    managers: Sequence[GroupManager], key: Hashable, hit: CacheHit, num_tokens: int
) -> ExternalReservation:
    """What a reader with tables up to ``num_tokens`` that begin with ``hit`` has and lacks."""
    first = [len(blocks) for blocks in hit.block_ids]
    hit_tokens = (m.spanned_tokens(n) for m, n in zip(managers, first, strict=True))
    lacks = moved_blocks(managers, key, num_tokens, first)
    return ExternalReservation(num_tokens, tuple(hit_tokens), lacks)


def first_lacked(managers: Sequence[GroupManager], key: Hashable, lacks: Blocks) -> tuple[int, ...]:
    """Per group, position of the first token the reader lacks; past its table if it lacks none."""
    return tuple(
        manager.spanned_tokens(blocks[0][0] if blocks else len(manager.tables[key].blocks))
        for manager, blocks in zip(managers, lacks, strict=True)
    )


def first_blocks(
    managers: Sequence[GroupManager], positions: Sequence[int], num_tokens: int = 0
) -> tuple[int, ...]:
    """Per group, index of the block with the token at a position; of a state its first block.

    Args:
        managers: one per group.
        positions: per group; as many as a peer has named, who calls refuses another number.
        num_tokens: blocks that a query there does not see any more are passed over.
    """
    pairs = zip(managers, positions, strict=False)
    return tuple(
        max(manager.num_full_blocks(position), manager.first_block(num_tokens))
        for manager, position in pairs
    )


def complete_blocks(
    managers: Sequence[GroupManager], key: Hashable, num_computed: int, first: Sequence[int]
) -> tuple[Blocks, tuple[int, ...]]:
    """What can be offered before the prompt's end is computed, and where the rest begins.

    Only kinds that see everything: of the others the reader needs the end of the prompt.

    Args:
        managers: one per group.
        key: the sequence.
        num_computed: its tokens whose KV is in the pool.
        first: per group, index of the first block that was not offered yet.

    Returns:
        The complete blocks from ``first`` on, and per group the index after them.
    """
    ends = tuple(
        max(start, manager.num_settled(num_computed))
        for manager, start in zip(managers, first, strict=True)
    )
    blocks = tuple(
        tuple(enumerate(manager.tables[key].blocks[start:end], start))
        for manager, start, end in zip(managers, first, ends, strict=True)
    )
    return blocks, ends
