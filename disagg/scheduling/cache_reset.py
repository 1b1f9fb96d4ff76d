"""A reset of the prefix cache: what a worker forgets, and what stays in use."""

from collections import Counter
from collections.abc import Iterable

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.messages.session import PrefixCacheReset, ResetPrefixCache
from disagg.scheduling.sequence import Phase, Sequence


def reset_prefix_cache(
    kv: KVCacheCoordinator,
    sequences: Iterable[Sequence],
    reset: ResetPrefixCache,
) -> PrefixCacheReset:
    """Forget every cached content; nothing computed before this is found by a later request.

    Sequences, leases and transfers keep their blocks and go on. What they hold is not found any
    more, nor what is computed on top of it. A decode part counts as begun before anything of it is
    here: its prefill worker may have computed it already. Who waits in the queue has nothing yet,
    and computes what it was to pull: the owner may not have heard of the reset.
    What tiers have is forgotten apart (`disagg/scheduling/tiers/clearing.py`).
    """
    if not kv.policy.enabled:
        return PrefixCacheReset(
            reset.number,
            0,
            refused="there is no prefix cache (cache.prefix_caching)",
            router=reset.router,
        )
    for seq in sequences:
        if seq.phase in (Phase.WAITING, Phase.BACKOFF):
            seq.pull = None
        else:
            seq.request.publishes = False
    num_forgotten = kv.forget_prefixes()
    return PrefixCacheReset(reset.number, num_forgotten, in_use(kv), router=reset.router)


def in_use(kv: KVCacheCoordinator) -> tuple[tuple[str, int], ...]:
    """Blocks that are held, by kind of holder; one that several kinds hold counts for each."""
    held: Counter[str] = Counter()
    for holder, blocks in kv.pool.holders().items():
        held[str(holder[0] if isinstance(holder, tuple) else holder)] += len(blocks)
    in_tables = {block for blocks in kv.tables.all_blocks() for block in blocks} - {NULL_BLOCK}
    if in_tables:
        held["sequence"] = len(in_tables)
    return tuple(sorted(held.items()))
