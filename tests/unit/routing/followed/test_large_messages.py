"""A large message is taken in by parts, and means what it would mean at once."""

import pytest

from disagg.routing.followed.followed_caches import TAKEN_IN_BLOCKS
from disagg.routing.followed.vllm_events import read_message
from tests.unit.routing.followed.test_followed_caches import BLOCK, followed, stored, usable


@pytest.mark.parametrize("skips", [False, True])
def test_a_large_message_is_taken_in_by_parts_and_means_the_same(skips: bool) -> None:
    """At once it would hold all streams of a router up for as long as it takes."""
    num = 5 * TAKEN_IN_BLOCKS + 7
    tokens = [number % 997 for number in range(num * BLOCK)]
    hashes = list(range(num))
    stores = {"type": "BlockStored", "token_ids": tokens, "block_size": BLOCK, "medium": "GPU"}
    removes = {"type": "BlockRemoved", "medium": "GPU", "group_idx": 0}
    events: list[object] = [stores | {"block_hashes": hashes, "group_idx": 0}]
    if skips:
        window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": BLOCK}
        events.append(stores | window | {"block_hashes": hashes[1:], "group_idx": 1})
    events.append(removes | {"block_hashes": hashes[num - 3 :]})
    caches, cache = followed()
    cache.live(0, 0, read_message([0.0, events, 0]))
    cache.live(0, 1, read_message([0.0, [removes | {"block_hashes": [hashes[num - 4]]}], 0]))
    held = []
    while cache.has_due:
        assert not cache.view().is_complete
        held.append(cache.view().num_blocks)
        cache.take_in()
    assert len(set(held)) > 3, "parts"
    assert cache.view().is_complete
    assert cache.view().num_batches == 2
    assert usable(caches, [*tokens, 1]) == (num - 4) * BLOCK
    assert cache.view().num_unnamed == 0


def test_what_a_server_that_went_had_said_is_not_taken_in_any_more() -> None:
    num = 3 * TAKEN_IN_BLOCKS
    tokens = [number % 997 for number in range(num * BLOCK)]
    caches, cache = followed()
    stored(0, list(range(num)), tokens, cache=cache)
    assert cache.has_due
    cache.disconnected()
    assert not cache.has_due
    cache.connected(0)
    assert usable(caches, [*tokens, 1]) == 0
    stored(0, [1], tokens[:BLOCK], cache=cache)
    assert usable(caches, [*tokens, 1]) == BLOCK
