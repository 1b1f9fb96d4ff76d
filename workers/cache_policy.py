"""From a worker's options to what its prefix cache keeps."""

from collections.abc import Sequence

from disagg.errors import ConfigError
from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.blocks.retention import Retention
from disagg.kv.kinds.manager import GroupManager
from disagg.workers.options import WorkerOptions


def cache_policy(options: WorkerOptions) -> CachePolicy:
    """What the options ask for."""
    interval = options.retention_interval_tokens if options.retention == "sparse" else None
    sample = options.residency_sample
    return CachePolicy(
        enabled=options.prefix_caching,
        retention=Retention(interval),
        deduplicate=options.deduplication,
        eviction=options.eviction,
        observe_every=round(1 / sample) if sample else 0,
    )


def check_policy(policy: CachePolicy, managers: Sequence[GroupManager]) -> None:
    """Refuse a sparse retention where no block ever leaves a sequence's sight.

    Raises:
        ConfigError: it would change nothing.
    """
    if not policy.retention.is_dense and all(m.next_drop(0) is None for m in managers):
        raise ConfigError(
            "cache.retention=sparse: every layer of this model sees all tokens before it, so "
            "nothing could be left out; cache.retention=dense is what it has",
            param="cache.retention",
        )
