"""Times of cached blocks, by hand."""

from bisect import bisect_left

from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.messages.stats import RESIDENCY_BOUNDS_MS, ResidencyHistogram


def times_of(pool: BlockPool) -> dict[str, ResidencyHistogram]:
    assert pool.residency is not None
    return {one.name: one for one in pool.residency.histograms()}


def counts(*times_ms: int) -> tuple[int, ...]:
    places = [bisect_left(RESIDENCY_BOUNDS_MS, time_ms) for time_ms in times_ms]
    return tuple(places.count(place) for place in range(len(RESIDENCY_BOUNDS_MS) + 1))


def store(pool: BlockPool, first: int, num_blocks: int) -> list[int]:
    blocks = pool.allocate(num_blocks)
    values = [number.to_bytes(32, "big") for number in range(first, first + num_blocks)]
    pool.publish(0, blocks, values, parent_hash=None, first_position=0, block_tokens=1)
    return blocks


def test_lifetime_idle_time_and_gaps_are_those_of_the_observed_blocks() -> None:
    pool = BlockPool(5, 1, policy=CachePolicy(observe_every=2))  # of 1 to 4: 2 and 4
    assert pool.residency is not None
    pool.residency.now_ms = 1_000
    blocks = store(pool, 0, 4)
    pool.release(blocks)
    pool.residency.now_ms = 1_700
    pool.touch([1, 2])
    pool.release([1, 2])
    pool.residency.now_ms = 61_700
    pool.touch([2])
    pool.release([2])
    pool.residency.now_ms = 5_000_000
    pool.allocate(4)
    found = times_of(pool)
    assert found["reuse_gap"] == ResidencyHistogram("reuse_gap", counts(700, 60_000), 60_700)
    assert found["lifetime"].counts == counts(4_999_000, 4_999_000)
    assert found["idle"] == ResidencyHistogram(
        "idle", counts(4_938_300, 4_999_000), 4_938_300 + 4_999_000
    )


def test_what_is_forgotten_is_not_counted_as_evicted() -> None:
    pool = BlockPool(5, 1, policy=CachePolicy(observe_every=1))
    pool.release(store(pool, 0, 4))
    assert pool.clear_cache() == 4
    kept = store(pool, 10, 2)
    pool.forget(kept)
    pool.release(kept)
    pool.allocate(4)
    assert all(not sum(one.counts) for one in times_of(pool).values())


def test_nothing_is_observed_unless_asked() -> None:
    assert BlockPool(5, 1).residency is None
