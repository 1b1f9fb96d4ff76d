"""From the spec of a group to its manager; the only place that tells kinds apart."""

from typing import assert_never

from disagg.errors import ConfigError
from disagg.kv.block_pool import BlockPool
from disagg.kv.chunked_local import ChunkedLocalManager
from disagg.kv.cross_attention import CrossAttentionManager
from disagg.kv.full_attention import FullAttentionManager
from disagg.kv.layout import KVCacheGroup
from disagg.kv.linear_state import LinearStateManager
from disagg.kv.manager import GroupLimits, GroupManager
from disagg.kv.sliding_window import SlidingWindowManager
from disagg.kv.specs import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LinearStateSpec,
    MLASpec,
    SlidingWindowSpec,
)


def create_manager(
    group: KVCacheGroup,
    pool: BlockPool,
    *,
    hash_block_tokens: int,
    alignment_tokens: int,
    max_model_tokens: int,
    max_step_tokens: int,
    drops_last: bool,
    steps_max: int = 1,
) -> GroupManager:
    """Manager for one group.

    Args:
        group: the group.
        pool: the worker's pool.
        hash_block_tokens: tokens per link of the hash chain.
        alignment_tokens: hits of the whole model are multiples of it.
        max_model_tokens: longest sequence.
        max_step_tokens: most tokens of one sequence between two moves of its window.
        drops_last: EAGLE: hits must be proven one block further.
        steps_max: steps of one sequence that are in flight at once.

    Raises:
        ConfigError: a kind that is not supported, by name.
    """
    spec = group.spec

    def limits(num_tokens: int, spare_blocks: int = 0) -> GroupLimits:
        blocks = -(-min(num_tokens, max_model_tokens) // spec.block_tokens)
        return GroupLimits(hash_block_tokens, alignment_tokens, blocks + spare_blocks)

    match spec:
        case FullAttentionSpec() | MLASpec():
            return FullAttentionManager(group.group, spec, pool, limits(max_model_tokens))
        case SlidingWindowSpec():
            # One more block than the tokens fill: the window may start inside a block.
            peak = limits(spec.window_tokens - 1 + max_step_tokens, 1)
            return SlidingWindowManager(group.group, spec, pool, peak)
        case ChunkedLocalSpec() if not drops_last:
            # A chunk that is no multiple of the block starts inside one.
            spare = int(spec.chunk_tokens % spec.block_tokens > 0)
            peak = limits(spec.chunk_tokens + max_step_tokens, spare)
            return ChunkedLocalManager(group.group, spec, pool, peak)
        case LinearStateSpec():
            # The state that the oldest step in flight started from, and the end of each.
            peak = limits(0, (1 + steps_max) * group.blocks_per_state)
            return LinearStateManager(group, pool, peak)
        case CrossAttentionSpec() if not drops_last:
            fixed = GroupLimits(hash_block_tokens, alignment_tokens, spec.num_blocks)
            return CrossAttentionManager(group.group, spec, pool, fixed)
        case ChunkedLocalSpec() | CrossAttentionSpec():
            raise ConfigError(
                f"group {group.group}: {type(spec).__name__} cannot be an EAGLE group",
                param="eagle_groups",
            )
    assert_never(spec)
