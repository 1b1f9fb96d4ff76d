"""Rules of the coordinator one by one, each with the smallest case that shows it."""

from typing import Any

import pytest

from disagg.errors import InvariantViolation
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.messages.kv_events import BlocksRemoved, BlocksStored

FULL = FullAttentionSpec(16, 1, 8, 2)
FULL_WIDE = FullAttentionSpec(16, 2, 8, 2)
WINDOW = SlidingWindowSpec(16, 1, 8, 2, 33)  # two blocks


def coordinator(*specs: Spec, num_blocks: int, max_step_tokens: int = 64) -> KVCacheCoordinator:
    groups = tuple(KVCacheGroup(i, spec, (i,)) for i, spec in enumerate(specs))
    layout = KVCacheLayout(groups, max(spec.page_bytes for spec in specs), 16)
    return KVCacheCoordinator(
        layout, num_blocks, max_model_tokens=4096, max_step_tokens=max_step_tokens, steps_max=2
    )


def request(key: str, num_tokens: int, first: int = 0) -> KVSequence:
    made = KVSequence(key, list(range(first, first + num_tokens)))
    BlockHasher(b"test", 16).extend(made.hashes, made.token_ids)
    return made


def compute(kv: KVCacheCoordinator, made: KVSequence) -> None:
    assert kv.allocate(made, num_new_tokens=made.num_tokens)
    kv.publish(made.key, made.num_tokens)


def two_full_groups_where_the_hit_is_the_oldest() -> tuple[KVCacheCoordinator, KVSequence]:
    """Nothing is free but the hit (8 blocks) and two blocks that were freed after it."""
    kv = coordinator(FULL, FULL_WIDE, num_blocks=11)
    compute(kv, request("a", 64))
    compute(kv, request("b", 16, first=500))
    kv.free("a")
    kv.free("b")
    return kv, request("c", 80)


def test_all_hits_are_held_before_any_group_allocates() -> None:
    kv, again = two_full_groups_where_the_hit_is_the_oldest()
    hit = kv.find_longest_cache_hit(again, 79)
    assert hit.num_tokens == 64
    assert kv.allocate(again, num_new_tokens=16, hit=hit)
    assert [table[:4] for table in kv.tables.blocks("c")] == list(hit.block_ids)
    assert kv.num_free_blocks == 0
    kv.check()


def test_group_by_group_would_evict_another_groups_hit() -> None:
    kv, again = two_full_groups_where_the_hit_is_the_oldest()
    hit = kv.find_longest_cache_hit(again, 79)
    for manager in kv.managers:
        manager.adopt("c", hit.block_ids[manager.group], 64)
        manager.grow("c", 80)
    with pytest.raises(InvariantViolation, match="in tables of two groups"):
        kv.check()


def test_a_failed_allocation_changes_nothing() -> None:
    kv, again = two_full_groups_where_the_hit_is_the_oldest()
    hit = kv.find_longest_cache_hit(again, 79)
    before = (kv.num_free_blocks, kv.events.next_seq, kv.pool.cache.values())
    assert not kv.allocate(again, num_new_tokens=17, hit=hit)
    assert before == (kv.num_free_blocks, kv.events.next_seq, kv.pool.cache.values())
    assert kv.tables.num_held("c") == (0, 0)
    kv.check()


def test_nothing_is_published_before_its_step_has_completed() -> None:
    kv = coordinator(FULL, WINDOW, num_blocks=40)
    first = request("a", 64)
    assert kv.allocate(first, num_new_tokens=64)
    assert kv.find_longest_cache_hit(request("b", 64), 63).num_tokens == 0
    assert kv.events.next_seq == 0
    kv.publish("a", 32)
    assert kv.find_longest_cache_hit(request("b", 64), 63).num_tokens == 32
    with pytest.raises(InvariantViolation, match="never scheduled"):
        kv.publish("a", 65)


def test_a_step_keeps_what_an_abort_gives_up() -> None:
    kv = coordinator(FULL, WINDOW, num_blocks=40)
    first = request("a", 64)
    assert kv.allocate(first, num_new_tokens=64)
    kv.hold_step("s1", ["a"])
    kv.hold_step("s2", ["a"])
    with pytest.raises(InvariantViolation, match="in 2 steps already"):
        kv.hold_step("s3", ["a"])
    kv.free("a")
    assert kv.num_free_blocks == 39 - 8
    kv.release_step("s2")  # not in order, and twice
    kv.release_step("s2")
    assert kv.num_free_blocks == 39 - 8
    kv.check()
    kv.release_step("s1")
    assert kv.num_free_blocks == 39
    kv.check()


def test_a_step_does_not_hold_a_later_request_of_the_same_name() -> None:
    kv = coordinator(FULL, num_blocks=40)
    assert kv.allocate(request("a", 64), num_new_tokens=64)
    kv.hold_step("s", ["a"])
    kv.free("a")
    assert kv.allocate(request("a", 32, first=900), num_new_tokens=32)
    kv.free("a")
    assert kv.num_free_blocks == 39 - 4
    kv.release_step("s")
    assert kv.num_free_blocks == 39


def test_an_admitted_prompt_never_waits() -> None:
    kv = coordinator(FULL, WINDOW, num_blocks=30)
    first = request("a", 256)
    assert kv.admit("a", 256)
    assert kv.num_available_blocks == 29 - 16 - 7
    assert not kv.allocate(request("b", 64, first=999), num_new_tokens=64)
    assert kv.allocate(request("c", 48, first=999), num_new_tokens=48)
    assert kv.num_available_blocks == 0
    for computed in (64, 128, 192, 256):
        assert kv.allocate(first, num_new_tokens=64)
        kv.publish("a", computed)
        kv.release_out_of_window("a", computed)
        kv.check()
    assert kv.tables.num_held("a") == (16, 2)
    assert kv.num_available_blocks == kv.num_free_blocks  # all of the promise was drawn or ended
    kv.free("a")
    kv.free("c")
    assert kv.num_available_blocks == 29


def test_without_the_promise_it_would_wait() -> None:
    kv = coordinator(FULL, WINDOW, num_blocks=30)
    first = request("a", 256)
    assert kv.allocate(first, num_new_tokens=64)
    assert kv.allocate(request("b", 160, first=999), num_new_tokens=160)
    assert not kv.allocate(first, num_new_tokens=64)


def test_an_admitted_hit_is_kept_until_it_is_adopted() -> None:
    kv = coordinator(FULL, num_blocks=12)
    compute(kv, request("a", 64))
    kv.free("a")
    second = request("b", 96)
    hit = kv.find_longest_cache_hit(second, 95)
    assert kv.admit("b", 96, hit)
    assert kv.num_free_blocks == 7
    assert kv.allocate(request("c", 80, first=999), num_new_tokens=80)  # all that is left
    assert not kv.allocate(request("d", 16, first=555), num_new_tokens=16)
    assert kv.allocate(second, num_new_tokens=32)
    assert kv.tables.blocks("b")[0][:4] == hit.block_ids[0]
    assert dict(kv.pool.holders()) == {}
    kv.check()


def test_unpromise_gives_everything_back() -> None:
    kv = coordinator(FULL, WINDOW, num_blocks=40)
    compute(kv, request("a", 64))
    kv.free("a")
    second = request("b", 96)
    assert kv.admit("b", 96, kv.find_longest_cache_hit(second, 95))
    with pytest.raises(InvariantViolation):
        kv.admit("b", 96)
    kv.unpromise("b")
    kv.unpromise("b")
    assert kv.num_available_blocks == kv.num_free_blocks == 39
    kv.check()


def test_sharing_a_window_block_of_an_admitted_prompt_is_paid_for() -> None:
    """Else the window's move frees nothing, and the promise is hollow."""
    kv = coordinator(WINDOW, num_blocks=12)
    first = request("a", 512)
    assert kv.admit("a", 512)  # 7 of 11
    assert kv.allocate(first, num_new_tokens=64)
    kv.publish("a", 64)
    assert kv.num_available_blocks == 4
    second = request("b", 65)
    hit = kv.find_longest_cache_hit(second, 64)
    assert hit.num_tokens == 64
    assert kv.allocate(second, num_new_tokens=1, hit=hit)
    assert kv.num_available_blocks == 4 - 1 - 2  # one block, and two that "a" expects back
    assert kv.allocate(first, num_new_tokens=64)
    kv.check()
    assert kv.num_available_blocks == 1
    kv.free("b")
    kv.free("a")
    assert kv.num_available_blocks == 11


def test_a_duplicate_stays_private() -> None:
    kv = coordinator(FULL, num_blocks=40)
    assert kv.allocate(request("a", 64), num_new_tokens=64)
    assert kv.allocate(request("b", 64), num_new_tokens=64)
    kv.publish("a", 64)
    kv.publish("b", 64)
    assert kv.events.next_seq == 1
    assert kv.find_longest_cache_hit(request("c", 65), 64).block_ids[0] == kv.tables.blocks("a")[0]
    kv.free("a")
    kv.free("b")
    kv.check()


def test_blocks_are_counted_per_group_once_however_many_share_them() -> None:
    kv = coordinator(FULL, WINDOW, num_blocks=40, max_step_tokens=96)
    compute(kv, request("a", 96))
    assert kv.tables.count_blocks(kv.pool.cache) == ((6, 0), (6, 0))
    kv.release_out_of_window("a", 96)
    full, window = kv.tables.count_blocks(kv.pool.cache)
    assert full == (6, 0)
    assert window.num_held + window.num_cached == 6
    assert window.num_held < 6
    twin = request("b", 100)
    assert kv.allocate(twin, num_new_tokens=4, hit=kv.find_longest_cache_hit(twin, 99))
    shared = kv.tables.count_blocks(kv.pool.cache)
    assert shared[0] == (7, 0)  # six of them in two tables
    kv.free("a")
    kv.free("b")
    assert [group.num_held for group in kv.tables.count_blocks(kv.pool.cache)] == [0, 0]
    assert sum(
        group.num_cached for group in kv.tables.count_blocks(kv.pool.cache)
    ) == kv.num_usable_blocks - len(list(kv.pool._uncached))
    kv.check()


def test_lease_outlives_its_request() -> None:
    kv = coordinator(FULL, WINDOW, num_blocks=40)
    compute(kv, request("a", 100))
    offered = [block for group in kv.tables.in_window_blocks("a", 100) for _, block in group]
    kv.pool.hold("lease", offered)
    kv.free("a")
    assert kv.num_free_blocks == 39 - len(offered)
    with pytest.raises(InvariantViolation, match="exists already"):
        kv.pool.hold("lease", offered)
    assert kv.pool.drop("lease") == len(offered)
    assert kv.pool.drop("lease") == 0
    kv.check()


@pytest.mark.parametrize("blocks", [[0], [39], [1, 1]], ids=["null", "free", "twice"])
def test_what_cannot_be_held(blocks: list[int]) -> None:
    kv = coordinator(FULL, num_blocks=40)
    assert kv.allocate(request("a", 32), num_new_tokens=32)
    with pytest.raises(InvariantViolation):
        kv.pool.hold("lease", blocks)
    kv.check()


def corrupt_count(kv: KVCacheCoordinator) -> None:
    kv.pool._more_holds[1] = 1


def corrupt_free(kv: KVCacheCoordinator) -> None:
    kv.pool._uncached.add([1])


def release_a_free_block(kv: KVCacheCoordinator) -> None:
    kv.pool.release([next(iter(kv.pool._uncached))])


def release_a_private_block_twice(kv: KVCacheCoordinator) -> None:
    blocks = kv.pool.allocate(1)
    kv.pool.release(blocks)
    kv.pool.release(blocks)


def corrupt_index(kv: KVCacheCoordinator) -> None:
    kv.pool.cache._index[0].popitem()


def corrupt_table(kv: KVCacheCoordinator) -> None:
    kv.managers[0].tables["a"].blocks[0] = 0


def corrupt_promise(kv: KVCacheCoordinator) -> None:
    kv._promises._total += 1


@pytest.mark.parametrize(
    "corrupt",
    [
        corrupt_count,
        corrupt_free,
        release_a_free_block,
        release_a_private_block_twice,
        corrupt_index,
        corrupt_table,
        corrupt_promise,
    ],
)
def test_check_sees(corrupt: Any) -> None:
    kv = coordinator(FULL, num_blocks=40)
    compute(kv, request("a", 64))
    kv.check()
    corrupt(kv)
    with pytest.raises(InvariantViolation):
        kv.check()


def test_a_cached_block_that_becomes_free_twice_is_seen_at_once() -> None:
    kv = coordinator(FULL, num_blocks=40)
    compute(kv, request("a", 64))
    kv.free("a")
    with pytest.raises(InvariantViolation, match="free twice"):
        kv.pool.release([next(iter(kv.pool._cached_free))])


def test_events_rebuild_the_cache() -> None:
    """A reader that applies every event knows exactly what can be found."""
    kv = coordinator(FULL, WINDOW, num_blocks=24)
    known: list[set[bytes]] = [set(), set()]
    seq = 0
    for number in range(12):
        made = request(str(number), 96, first=1000 * (number % 5))
        hit = kv.find_longest_cache_hit(made, 95)
        assert kv.allocate(made, num_new_tokens=96 - hit.num_tokens, hit=hit)
        kv.publish(made.key, 96)
        kv.free(made.key)
        batch = kv.events.since(seq)
        assert batch is not None
        seq = batch.next_seq
        for event in batch.events:
            if isinstance(event, BlocksStored):
                start = event.first_position // event.block_tokens
                assert list(event.hashes) == made.hashes[start : start + len(event.hashes)]
                known[event.group] |= set(event.hashes)
            else:
                assert isinstance(event, BlocksRemoved)
                known[event.group] -= set(event.hashes)
        assert [set(hashes) for hashes in kv.events.snapshot().hashes] == known
    assert kv.events.snapshot().next_seq == seq
    kv.pool.clear_cache()
    kv.check()
    assert kv.events.snapshot().hashes == ((), ())


def test_a_gap_in_the_events_asks_for_a_snapshot() -> None:
    layout = KVCacheLayout((KVCacheGroup(0, FULL, (0,)),), FULL.page_bytes, 16)
    kv = KVCacheCoordinator(
        layout, 99, max_model_tokens=4096, max_step_tokens=64, events_max=2, events_with_tokens=True
    )
    for number in range(3):
        compute(kv, request(str(number), 32, first=100 * number))
    assert kv.events.since(0) is None
    assert kv.events.since(4) is None
    batch = kv.events.since(1)
    assert batch is not None
    assert [event.token_ids for event in batch.events] == [  # type: ignore[union-attr]
        tuple(range(100, 132)),
        tuple(range(200, 232)),
    ]
