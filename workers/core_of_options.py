"""From a worker's options and its engine to its core."""

import random

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.identity import Incarnation
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.limits import STEPS_MAX
from disagg.scheduling.tiers.index import TierSetting
from disagg.workers.cache_policy import cache_policy, check_policy
from disagg.workers.engines.protocol import Engine
from disagg.workers.limits import worker_limits
from disagg.workers.options import WorkerOptions


def build_core(
    incarnation: Incarnation,
    options: WorkerOptions,
    engine: Engine,
    layout: KVCacheLayout,
    hash_key: bytes,
    tiers: tuple[TierSetting, ...],
) -> WorkerCore:
    """A worker's decisions over an empty pool.

    Args:
        incarnation: whose.
        options: what it was started with.
        engine: how much memory there is, and what the model can do.
        layout: of the pool, with the blocks that are hashed.
        hash_key: of the blocks' chain values.
        tiers: what is known of each.

    Raises:
        ConfigError: the options ask for what this model's cache cannot do.
    """
    max_model_tokens = min(
        options.max_model_tokens or engine.max_model_tokens, engine.max_model_tokens
    )
    policy = cache_policy(options)
    coordinator = KVCacheCoordinator(
        layout,
        engine.region.num_blocks,
        max_model_tokens=max_model_tokens,
        max_step_tokens=STEPS_MAX * options.max_step_tokens,
        steps_max=STEPS_MAX,
        eagle_groups=engine.drafts.eagle_groups,
        num_lookahead_tokens=engine.drafts.num_tokens,
        policy=policy,
        events_with_tokens=bool(options.kv_events_endpoint),
    )
    check_policy(policy, coordinator.managers)
    limits = worker_limits(options, max_model_tokens, engine.layout.block_bytes)
    drawn = random.SystemRandom()

    def random_delay_ms(passes: int) -> int:
        longest = options.reserve_retry_max_ms * min(passes, 10)
        return drawn.randint(options.reserve_retry_min_ms, longest)

    hasher = BlockHasher(hash_key, layout.hash_block_tokens)
    return WorkerCore(incarnation, layout, coordinator, hasher, limits, random_delay_ms, tiers)
