"""What is left of an evicted state of several blocks never completes a newer one."""

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout

SIZE = 4
STATE = 1


def coordinator() -> KVCacheCoordinator:
    full, state = FullAttentionSpec(SIZE, 1, 4, 2), LinearStateSpec(SIZE, 182)
    groups = (KVCacheGroup(0, full, (0,)), KVCacheGroup(1, state, (1,), blocks_per_state=3))
    return KVCacheCoordinator(
        KVCacheLayout(groups, 64, SIZE), 16, max_model_tokens=64, max_step_tokens=16
    )


def sequence(key: str) -> KVSequence:
    made = KVSequence(key, list(range(9)))
    BlockHasher(b"states", SIZE).extend(made.hashes, made.token_ids)
    return made


def test_old_followers_are_not_taken_for_the_new_states() -> None:
    kv = coordinator()
    assert kv.allocate(sequence("a"), num_new_tokens=8)
    first, *followers = kv.tables.blocks("a")[STATE][3:]
    kv.publish("a", 8)
    kv.free("a")
    # Evict tokens' blocks and the state's first block: its followers stay cached.
    taken = kv.pool.allocate(kv.num_free_blocks - 2)
    assert first in taken
    assert all(map(kv.pool.cache.has, followers))
    # The same state is computed again, and its first block happens to be the same one.
    taken.remove(first)
    others = sorted(taken)[-4:]
    for blocks in ([first], others):
        kv.pool.release(blocks)
    assert kv.allocate(sequence("b"), num_new_tokens=8)
    computed = kv.tables.blocks("b")[STATE][3:]
    assert computed[0] == first
    assert not set(computed[1:]) & {*followers, NULL_BLOCK}
    kv.publish("b", 8)
    found = kv.find_longest_cache_hit(sequence("c"), 8).block_ids[STATE][3:]
    assert found in ([], computed), "the new state's first block with the old one's followers"
    assert kv.group_hit_tokens(sequence("c")) == (8, 0)
    kv.pool.release([block for block in taken if block not in others])
    kv.free("b")
    kv.check()
    assert kv.num_free_blocks == kv.num_usable_blocks
