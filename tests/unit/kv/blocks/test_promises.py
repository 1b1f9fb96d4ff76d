"""Promises to admitted prompts: paid where blocks are shared, exact while steps are in flight."""

import pytest

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.kv_events import BlocksRemoved

WINDOW = SlidingWindowSpec(16, 1, 8, 2, 33)  # two blocks


def coordinator(spec: Spec, num_usable: int, max_step_tokens: int = 64) -> KVCacheCoordinator:
    return KVCacheCoordinator(
        KVCacheLayout.one_layer_per_group([spec]),
        num_usable + 1,
        max_model_tokens=4096,
        max_step_tokens=max_step_tokens,
        steps_max=2,
    )


def sequence(key: str, num_tokens: int, first: int = 0, size: int = 16) -> KVSequence:
    made = KVSequence(key, list(range(first, first + num_tokens)))
    BlockHasher(b"test", size).extend(made.hashes, made.token_ids)
    return made


# -- blocks that are shared -------------------------------------------------------------------


def with_an_admitted_prompt(num_usable: int) -> tuple[KVCacheCoordinator, KVSequence, KVSequence]:
    """ "a" is promised 7 blocks and has computed 64 tokens; "b" has them as its hit."""
    kv = coordinator(WINDOW, num_usable)
    first = sequence("a", 512)
    assert kv.admit("a", 512)
    assert kv.allocate(first, num_new_tokens=64)
    kv.publish("a", 64)
    assert kv.num_available_blocks == num_usable - 7
    return kv, first, sequence("b", 65)


def goes_on(kv: KVCacheCoordinator, made: KVSequence) -> None:
    """The admitted prompt never waits."""
    for done in range(128, 513, 64):
        assert kv.allocate(made, num_new_tokens=64), f"waits at {done}"
        kv.publish(made.key, done)
        kv.check()


@pytest.mark.parametrize("admits", [False, True])
def test_who_shares_what_a_promise_expects_back_pays_for_it(admits: bool) -> None:
    """One new block, and two whose drop will free nothing for "a": 3 where 2 are left."""
    for spare, fits in ((2, False), (3, True)):
        kv, first, second = with_an_admitted_prompt(7 + spare)
        hit = kv.find_longest_cache_hit(second, 64)
        assert hit.num_tokens == 64
        if admits:
            assert kv.admit("b", 65, hit) == fits
        else:
            assert kv.allocate(second, num_new_tokens=1, hit=hit) == fits
        assert kv.num_available_blocks == (0 if fits else spare)
        goes_on(kv, first)


# -- two steps of one sequence in flight ------------------------------------------------------


def two_in_flight(num_usable: int) -> tuple[KVCacheCoordinator, KVSequence]:
    """ "a" (promised 7) in chunks of 32, the second and the third in flight; "b" has 4 blocks.

    Blocks 0 and 1 have left the window of the third step, but the second one still sees them.
    """
    kv = coordinator(WINDOW, num_usable)
    first = sequence("a", 512)
    assert kv.admit("a", 512)
    assert kv.allocate(sequence("b", 64, 9_000), num_new_tokens=64)
    for step in (1, 2, 3):
        assert kv.allocate(first, num_new_tokens=32)
        kv.hold_step(step, ["a"])
        if step == 1:
            kv.publish("a", 32)
            kv.release_step(1)
    assert kv.tables.num_held("a") == (6,)
    kv.check()
    return kv, first


def test_what_a_step_still_sees_is_not_promised_as_well() -> None:
    """Else others would be refused blocks that are free and promised to nobody."""
    kv, _ = two_in_flight(7 + 4 + 2)
    assert kv.num_available_blocks == 2
    assert kv.allocate(sequence("c", 32, 5_000), num_new_tokens=32)
    kv.check()


def test_what_a_step_has_computed_is_published_though_the_next_one_was_launched() -> None:
    """Also what no later step sees: a prompt that leaves this one there finds it."""
    kv, first = two_in_flight(7 + 4 + 8)
    kv.publish("a", 64)
    kv.release_step(2)
    assert kv.allocate(first, num_new_tokens=32)
    assert kv.tables.num_held("a") == (6,), "the window has moved"
    for num_tokens in (16, 32, 48, 64):
        shorter = sequence("b", num_tokens + 1)
        assert kv.find_longest_cache_hit(shorter, num_tokens).num_tokens == num_tokens


def test_what_leaves_the_window_returns_to_the_promise() -> None:
    """Else others could take it, and the admitted prompt would wait."""
    kv, first = two_in_flight(7 + 4)
    kv.publish("a", 64)
    kv.release_step(2)
    assert kv.num_available_blocks == 0
    assert not kv.allocate(sequence("c", 16, 5_000), num_new_tokens=16)
    for step in range(4, 17):
        assert kv.allocate(first, num_new_tokens=32), f"waits before step {step}"
        kv.hold_step(step, ["a"])
        kv.publish("a", 32 * (step - 1))
        kv.release_step(step - 1)
        kv.check()


# -- the peak ---------------------------------------------------------------------------------

PEAKS = [
    (spec, step)
    for spec in (
        ChunkedLocalSpec(4, 1, 8, 2, 6),
        ChunkedLocalSpec(4, 1, 8, 2, 8),
        ChunkedLocalSpec(4, 1, 8, 2, 10),
        SlidingWindowSpec(4, 1, 8, 2, 6),
        SlidingWindowSpec(4, 1, 8, 2, 9),
    )
    for step in (4, 6, 10)
]


def waits_at_most(spec: Spec, step: int, fewer: int = 0) -> list[int]:
    """First chunks after which an admitted prompt waits, where nothing is free but its promise."""
    waiting = []
    for first in range(1, step + 1):
        kv = coordinator(spec, 64, step)
        kv.managers[0].peak_blocks -= fewer
        made = sequence("a", 60, size=4)
        assert kv.admit("a", 60)
        kv.pool.hold("others", kv.pool.allocate(kv.num_available_blocks))
        done = 0
        while done < 60:
            new = min(step if done else first, 60 - done)
            if not kv.allocate(made, num_new_tokens=new):
                waiting.append(first)
                break
            done += new
            kv.publish("a", done)
            kv.release_out_of_window("a", done)
    return waiting


@pytest.mark.parametrize(("spec", "step"), PEAKS, ids=str)
def test_an_admitted_prompt_never_waits_however_it_is_cut(spec: Spec, step: int) -> None:
    assert waits_at_most(spec, step) == []


def test_control_a_chunk_that_begins_inside_a_block_needs_the_spare_one() -> None:
    assert waits_at_most(ChunkedLocalSpec(4, 1, 8, 2, 6), 10, fewer=1)


# -- the order of eviction inside a window ----------------------------------------------------


def test_of_the_blocks_that_leave_a_window_the_last_is_evicted_first() -> None:
    """A run from the start stays a hit, one block shorter."""
    kv = coordinator(WINDOW, 12, max_step_tokens=128)
    made = sequence("a", 128)
    assert kv.allocate(made, num_new_tokens=128)
    kv.publish("a", 128)
    kv.release_out_of_window("a", 128)
    assert kv.tables.num_held("a") == (2,)
    kv.pool.allocate(4 + 1)  # those never used, and one that is cached
    batch = kv.events.since(0)
    assert batch is not None
    removed = [event for event in batch.events if isinstance(event, BlocksRemoved)]
    assert [event.hashes for event in removed] == [(made.hashes[5],)]
