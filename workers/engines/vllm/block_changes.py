"""What has to be done to blocks before vLLM's runner computes a step in them.

Its kernels need finite bytes in slots that nobody has written, so blocks that a step begins to fill
are zeroed. And it updates a linear state in place, in one block per request, where our scheduler
gives it a new one each time its sequence passes a multiple of the group's ``block_tokens``: the old
one stays what it was there, for prefix hits and for whoever reads it. So the state is copied into
its new block, and the runner is told of that block alone (`RunnerBatch`).
"""

from typing import NamedTuple

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.kinds.kind import keeps_states
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.scheduling.block_tables import BlockTables
from disagg.scheduling.step import Step


class BlockChanges(NamedTuple):
    """What is done to blocks before a step, in this order.

    It may concern blocks of sequences that were lost after this was listed: the step holds them.
    """

    zeroed: list[int]
    copied: list[tuple[int, int]]
    """From and to."""


def fresh_blocks(step: Step, tables: BlockTables, layout: KVCacheLayout) -> list[int]:
    """Blocks that a step begins to fill: new in their tables, with no token before the slice."""
    fresh: list[int] = []
    for part in step.slices:
        for group, change in enumerate(part.table_changes):
            table = tables[part.key][group]
            first_unwritten = -(-part.start // layout.groups[group].spec.block_tokens)
            fresh += table[max(first_unwritten, len(table) - len(change.new_blocks)) :]
    return [block for block in fresh if block != NULL_BLOCK]


def state_copies(step: Step, tables: BlockTables, layout: KVCacheLayout) -> list[tuple[int, int]]:
    """Blocks to copy before a step, from and to: of each state that the step ends elsewhere.

    A sequence that starts at 0 has no state yet: the runner takes nothing for one, and its block
    is a fresh one.
    """
    states = [group for group in layout.groups if keeps_states(group.spec)]
    groups = [(group.group, group.spec.block_tokens) for group in states]
    copies: list[tuple[int, int]] = []
    for part in step.slices:
        last = part.start + len(part.token_ids) - 1
        for group, tokens in groups:
            before, after = (part.start - 1) // tokens, last // tokens
            if part.start and before != after:
                table = tables[part.key][group]
                copies.append((table[before], table[after]))
    return copies
