"""What is done for many blocks or sequences at once equals what is done one by one."""

import random

import pytest

from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout

FULL = FullAttentionSpec(4, 1, 8, 2)


def coordinator(*specs: Spec, num_blocks: int) -> KVCacheCoordinator:
    groups = tuple(KVCacheGroup(i, spec, (i,)) for i, spec in enumerate(specs))
    layout = KVCacheLayout(groups, max(spec.page_bytes for spec in specs), 4)
    return KVCacheCoordinator(layout, num_blocks, max_model_tokens=4000, max_step_tokens=2000)


def request(key: str, num_tokens: int, first: int = 0) -> KVSequence:
    made = KVSequence(key, list(range(first, first + num_tokens)))
    BlockHasher(b"bulk", 4).extend(made.hashes, made.token_ids)
    return made


def values(number: int) -> list[bytes]:
    return [b"%031d." % n for n in range(number)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("deduplicate", [True, False])
def test_a_run_ends_where_the_first_value_is_missing(seed: int, deduplicate: bool) -> None:
    """Whatever lies where in the pool: neighbours, scattered, copies, other groups between."""
    chance = random.Random(seed)
    pool = BlockPool(1200, 2)
    wanted = values(500)
    place = 0
    while place < len(wanted):
        size = min(chance.choice([1, 2, 30, 200]), len(wanted) - place)
        blocks = pool.allocate(size)
        if chance.random() < 0.3:
            chance.shuffle(blocks)
        group = int(chance.random() < 0.2)
        for number in {group, 0}:
            pool.publish(
                number,
                blocks if number == group else pool.allocate(size),
                wanted[place : place + size],
                parent_hash=None,
                first_position=0,
                block_tokens=4,
            )
        if chance.random() < 0.3:
            pool.publish(
                0,
                pool.allocate(1),
                wanted[place : place + 1],
                parent_hash=None,
                first_position=0,
                block_tokens=4,
                deduplicate=deduplicate,
            )
        place += size
    for lost in sorted(chance.sample(range(500), chance.randrange(4)), reverse=True):
        pool.forget([pool.cache.index(0)[wanted[lost]]])
        end = chance.randrange(len(wanted))
        expected = []
        for value in wanted[:end]:
            if value not in pool.cache.index(0):
                break
            expected.append(pool.cache.index(0)[value])
        found = pool.cache.leading_run(0, wanted, end)
        assert found == expected, f"seed {seed}"


@pytest.mark.parametrize("seed", range(30))
def test_a_window_is_found_wherever_it_is(seed: int) -> None:
    chance = random.Random(seed)
    window = chance.choice([1, 2, 5, 30, 100, 400])
    kv = coordinator(SlidingWindowSpec(4, 1, 8, 2, window), num_blocks=700)
    asked = request("a", 2000)
    assert kv.allocate(asked, num_new_tokens=2000)
    kv.publish("a", 2000)
    holes = set(chance.sample(range(500), chance.choice([0, 1, 10, 60, 250, 499])))
    kv.pool.forget([kv.tables.blocks("a")[0][hole] for hole in holes])
    need = -(-(window - 1) // 4)
    ends = [
        end for end in range(500) if all(b not in holes for b in range(max(0, end - need), end))
    ]
    assert kv.find_longest_cache_hit(asked, 1999).num_tokens == 4 * max(ends), f"seed {seed}"


@pytest.mark.parametrize(
    "spec",
    [
        *(SlidingWindowSpec(4, 1, 8, 2, window) for window in (1, 2, 4, 5, 23)),
        *(ChunkedLocalSpec(4, 1, 8, 2, chunk) for chunk in (2, 4, 6, 16, 18)),
        LinearStateSpec(4, 32),
        FULL,
    ],
    ids=str,
)
def test_the_next_drop_is_where_the_first_seen_block_moves(spec: Spec) -> None:
    (manager,) = coordinator(spec, num_blocks=4).managers
    for skipped in range(6):
        later = (n for n in range(200) if manager.first_block(n) > skipped)
        assert manager.next_drop(skipped) == next(later, None)


def test_decodes_at_once_are_decodes_one_by_one() -> None:
    """In every coordinator the same blocks are held after every step, and the same are cached."""
    specs = (FULL, SlidingWindowSpec(4, 1, 8, 2, 10), LinearStateSpec(4, 32))
    one, many = (coordinator(*specs, num_blocks=200) for _ in range(2))
    pairs = [
        tuple(request(f"r{number}", 5 + 3 * number, 1000 * number) for _ in range(2))
        for number in range(6)
    ]
    for made, twin in pairs:  # the first one begins with the first step
        for kv, asked in ((one, made), (many, twin)) if made.key != "r0" else ():
            assert kv.allocate(asked, num_new_tokens=asked.num_tokens)
            kv.publish(asked.key, asked.num_tokens)
            asked.token_ids.append(7)
    hasher = BlockHasher(b"bulk", 4)
    for step in range(40):
        served = [one.allocate(made, num_new_tokens=1) for made, _ in pairs]
        assert many.allocate_decodes([twin for _, twin in pairs]) == len(pairs)
        assert all(served)
        for made, _ in pairs:
            one.publish(made.key, one.num_scheduled_tokens(made.key))
        many.publish_step([(twin.key, many.num_scheduled_tokens(twin.key)) for _, twin in pairs])
        for asked in (asked for pair in pairs for asked in pair):
            asked.token_ids.append(step)
            hasher.extend(asked.hashes, asked.token_ids)
        assert [one.tables.blocks(m.key) for m, _ in pairs] == [
            many.tables.blocks(m.key) for m, _ in pairs
        ]
        assert one.events.snapshot() == many.events.snapshot()
        many.check()


def test_decodes_stop_at_the_first_that_lacks_a_block() -> None:
    kv = coordinator(FULL, num_blocks=1 + 3 + 1)
    running = [request(name, 4, 100 * place) for place, name in enumerate("abc")]
    for made in running:
        assert kv.allocate(made, num_new_tokens=4)
    assert kv.allocate_decodes(running) == 1
    assert [kv.num_scheduled_tokens(made.key) for made in running] == [5, 4, 4]
    kv.free("c")
    assert kv.allocate_decodes(running[1:2]) == 1
    kv.check()
