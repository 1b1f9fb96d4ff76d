"""Slots for drafts behind the tokens of a step; groups whose hits are proven further."""

from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.scheduling.admission import num_blocks_for

FULL, WINDOW = FullAttentionSpec(4, 1, 4, 2), SlidingWindowSpec(4, 1, 4, 2, 9)
DRAFTS = 3


def coordinator(*specs: Spec, **more: Any) -> KVCacheCoordinator:
    layout = KVCacheLayout.one_layer_per_group(specs or (FULL, WINDOW))
    return KVCacheCoordinator(layout, 60, max_model_tokens=40, max_step_tokens=8, **more)


def sequence(num_tokens: int) -> KVSequence:
    made = KVSequence("a", list(range(num_tokens)))
    BlockHasher(b"test", 4).extend(made.hashes, made.token_ids)
    return made


def slots(kv: KVCacheCoordinator) -> int:
    return 4 * min(len(table) for table in kv.tables.blocks("a"))


def decode_to_the_end(kv: KVCacheCoordinator) -> None:
    """Every step has room for its token and the drafts behind it, as far as the model goes."""
    made = sequence(7)
    assert kv.admit("a", 7)
    assert kv.allocate(made, num_new_tokens=7)
    for computed in range(7, 40):
        assert slots(kv) >= min(computed + DRAFTS, 40)
        kv.publish("a", computed)
        made.token_ids.append(computed)
        assert kv.allocate_decodes([made]) == 1
        kv.check()
    assert slots(kv) == 40


def test_every_step_has_slots_for_drafts_up_to_the_longest_sequence() -> None:
    decode_to_the_end(coordinator(num_lookahead_tokens=DRAFTS))


def test_without_them_there_is_no_room() -> None:
    with pytest.raises(AssertionError):
        decode_to_the_end(coordinator())


def test_drafts_are_counted_before_a_prompt_is_let_in_and_are_not_published() -> None:
    kv = coordinator(num_lookahead_tokens=DRAFTS)
    assert num_blocks_for(kv, 8) == num_blocks_for(coordinator(), 8 + DRAFTS)
    made = sequence(8)
    assert kv.allocate(made, num_new_tokens=8)
    kv.publish("a", 8)
    assert [len(values) for values in kv.pool.cache.values()] == [2, 2, 0]
    assert kv.tables.num_held("a") == (3, 3)
    kv.free("a")
    kv.check()
    assert kv.num_free_blocks == kv.num_usable_blocks


def test_a_reservation_has_them_too_and_pulls_none_of_them() -> None:
    kv = coordinator(num_lookahead_tokens=DRAFTS)
    reserved = kv.reserve_external(sequence(8), 8)
    assert reserved is not None
    assert slots(kv) >= 8 + 1 + DRAFTS
    assert [[place for place, _ in group] for group in reserved.lacks] == [[0, 1], [0, 1]]


def test_a_linear_state_cannot_go_back_behind_a_draft() -> None:
    state = LinearStateSpec(4, 64)
    with pytest.raises(ConfigError, match="LinearStateSpec has no slots for drafts"):
        coordinator(FULL, state, num_lookahead_tokens=1)
    coordinator(FULL, state)


def test_an_eagle_groups_hit_is_proven_one_block_further() -> None:
    def hit(**more: Any) -> int:
        kv = coordinator(**more)
        made = sequence(20)
        for start in range(0, 20, 4):
            assert kv.allocate(made, num_new_tokens=4)
            kv.publish("a", start + 4)
        return kv.find_longest_cache_hit(sequence(23), 22).num_tokens

    assert hit() == 20
    assert hit(eagle_groups=[0]) == 16
