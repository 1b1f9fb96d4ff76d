"""From options to what the prefix cache keeps; what would change nothing is refused by name."""

from dataclasses import replace

import pytest

from disagg.errors import ConfigError
from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.blocks.retention import Retention
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.workers.cache_policy import cache_policy, check_policy
from disagg.workers.options import WorkerOptions

OPTIONS = WorkerOptions("w", "both", "", "tiny", ())
FULL = FullAttentionSpec(16, 1, 8, 2)


def test_the_options_become_the_policy() -> None:
    assert cache_policy(OPTIONS) == CachePolicy(eviction="segmented_lru", observe_every=100)
    sparse = replace(OPTIONS, retention="sparse", retention_interval_tokens=512)
    assert cache_policy(sparse).retention == Retention(512)
    assert cache_policy(replace(OPTIONS, retention="sparse")).retention == Retention(0)
    others = replace(
        OPTIONS,
        prefix_caching=False,
        deduplication=False,
        eviction="lru",
        residency_sample=0.0,
    )
    assert cache_policy(others) == CachePolicy(enabled=False, deduplicate=False, eviction="lru")


@pytest.mark.parametrize("other", [SlidingWindowSpec(16, 1, 8, 2, 33), LinearStateSpec(16, 512)])
def test_sparse_is_for_models_in_which_something_leaves_the_sight(other: Spec) -> None:
    def check(*specs: Spec) -> None:
        policy = CachePolicy(retention=Retention(0))
        layout = KVCacheLayout.one_layer_per_group(specs)
        kv = KVCacheCoordinator(layout, 40, max_model_tokens=64, max_step_tokens=64, policy=policy)
        check_policy(policy, kv.managers)
        check_policy(CachePolicy(), kv.managers)

    check(FULL, other)
    with pytest.raises(ConfigError, match=r"cache\.retention=sparse: every layer"):
        check(FULL)
