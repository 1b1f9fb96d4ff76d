"""Which free cached blocks are given up first."""

import random

import pytest

from disagg.errors import ConfigError, InvariantViolation
from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.blocks.segmented_lru import FOUND_SHARE_MAX, SegmentedBlocks


def value(number: int) -> bytes:
    return number.to_bytes(32, "big")


def store(pool: BlockPool, numbers: list[int]) -> list[int]:
    """Blocks with these contents, held once."""
    blocks = pool.allocate(len(numbers))
    values = [value(number) for number in numbers]
    pool.publish(0, blocks, values, parent_hash=None, first_position=0, block_tokens=1)
    return blocks


def found(pool: BlockPool, number: int) -> bool:
    return value(number) in pool.cache.index(0)


@pytest.mark.parametrize(("eviction", "kept"), [("segmented_lru", True), ("lru", False)])
def test_what_was_found_again_outlives_prompts_seen_once(eviction: str, kept: bool) -> None:
    pool = BlockPool(21, 1, policy=CachePolicy(eviction=eviction))
    shared = store(pool, [1, 2])
    pool.touch(shared)  # a second request
    pool.release(shared)
    pool.release(shared)
    for first in range(100, 200, 10):  # five times what fits besides
        pool.release(store(pool, list(range(first, first + 10))))
        pool.check()
    assert found(pool, 1) is kept
    assert found(pool, 2) is kept


def test_found_blocks_leave_room_for_new_contents() -> None:
    pool = BlockPool(11, 1, policy=CachePolicy(eviction="segmented_lru"))
    blocks = store(pool, list(range(10)))
    pool.touch(blocks)
    pool.release(blocks)
    pool.release(blocks)
    pool.check()
    pool.release(store(pool, [100, 101]))
    assert found(pool, 100)
    assert [number for number in range(10) if not found(pool, number)] == [0, 1]
    assert int(FOUND_SHARE_MAX * 10) == 8


def test_a_new_content_in_a_block_that_was_found_begins_as_new() -> None:
    pool = BlockPool(3, 1, policy=CachePolicy(eviction="segmented_lru"))
    blocks = store(pool, [1, 2])
    pool.touch(blocks)
    pool.forget(blocks)  # held twice: they stay
    assert found(pool, 1)
    pool.release(blocks)
    pool.forget(blocks)
    assert not found(pool, 1)
    pool.release(blocks)
    again = store(pool, [3, 4])
    assert sorted(again) == sorted(blocks)
    pool.release(again)
    pool.check()
    assert sorted(pool.allocate(2)) == sorted(blocks)


def test_random_lives_keep_the_order_sound() -> None:
    seed = 7
    chance, order, held = random.Random(seed), SegmentedBlocks(), set(range(1, 40))
    for _ in range(3_000):
        some = chance.sample(sorted(held), min(len(held), chance.randrange(4)))
        match chance.randrange(4):
            case 0:
                order.found(some)
            case 1:
                order.add(some)
                held -= set(some)
            case 2 if len(order):
                free = chance.sample(sorted(order), min(len(order), 3))
                assert order.has_all(free)
                order.remove(free)
                held |= set(free)
            case 3 if len(order) > 5:
                taken = order.take(3)
                order.gone(taken)
                held |= set(taken)
        order.check()
        assert len(order) + len(held) == 39
    with pytest.raises(InvariantViolation):
        order.add([next(iter(order))])


def test_a_block_counted_in_the_wrong_segment_is_noticed() -> None:
    order = SegmentedBlocks()
    order.add([1, 2, 3])
    order.found([2])  # while it is free: the pool has it held then
    with pytest.raises(InvariantViolation):
        order.check()


def test_an_unknown_order_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="known: lru, segmented_lru"):
        CachePolicy(eviction="fifo")
