"""Which windows stay findable after a sequence has moved on."""

import pytest

from disagg.errors import ConfigError
from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.blocks.retention import Retention
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.messages.kv_events import BlocksRemoved, BlocksStored

FULL = FullAttentionSpec(16, 1, 8, 2)
WINDOW = SlidingWindowSpec(16, 1, 8, 2, 33)  # two blocks
STATE = LinearStateSpec(16, 512)


def coordinator(retention: Retention, *specs: Spec) -> KVCacheCoordinator:
    groups = tuple(KVCacheGroup(i, spec, (i,)) for i, spec in enumerate(specs))
    layout = KVCacheLayout(groups, 512, 16)
    return KVCacheCoordinator(
        layout,
        400,
        max_model_tokens=4096,
        max_step_tokens=64,
        policy=CachePolicy(retention=retention),
    )


def serve(kv: KVCacheCoordinator, key: str, tokens: list[int]) -> int:
    """One prompt from start to end in chunks of 64; returns the tokens that it hit."""
    made = KVSequence(key, tokens)
    BlockHasher(b"test", 16).extend(made.hashes, made.token_ids)
    hit = kv.find_longest_cache_hit(made, made.num_tokens - 1)
    done = hit.num_tokens
    while done < made.num_tokens:
        new = min(64 - done % 64, made.num_tokens - done)
        first = hit if done == hit.num_tokens else None
        assert kv.allocate(made, num_new_tokens=new, hit=first)
        done += new
        kv.publish(key, done)
        kv.release_out_of_window(key, done)
        kv.check()
    kv.free(key)
    kv.check()
    return hit.num_tokens


def prompt(shared: int, own: int, name: int) -> list[int]:
    return [*range(shared), *range(1000 * name, 1000 * name + own)]


@pytest.mark.parametrize("moving", [WINDOW, STATE], ids=["window", "state"])
def test_a_junction_is_kept_from_the_second_prompt_on(moving: Spec) -> None:
    kv = coordinator(Retention(0), FULL, moving)
    hits = [serve(kv, str(name), prompt(256, 320, name)) for name in (1, 2, 3, 4)]
    assert hits == [0, 0, 256, 256]


def test_dense_keeps_it_from_the_first() -> None:
    kv = coordinator(Retention(), FULL, WINDOW)
    hits = [serve(kv, str(name), prompt(256, 320, name)) for name in (1, 2, 3)]
    assert hits == [0, 256, 256]


def test_every_n_tokens_keeps_the_nearest_before_it() -> None:
    kv = coordinator(Retention(96), FULL, WINDOW)
    assert serve(kv, "1", prompt(250, 320, 1)) == 0
    assert serve(kv, "2", prompt(250, 320, 2)) == 192


def test_a_repeated_and_a_longer_prompt_resume_at_the_end() -> None:
    kv = coordinator(Retention(0), FULL, WINDOW)
    tokens = prompt(320, 0, 1)
    assert serve(kv, "1", tokens) == 0
    assert serve(kv, "2", tokens) == 304
    assert serve(kv, "3", [*tokens, *range(5000, 5400)]) == 320
    assert serve(kv, "4", tokens) == 304  # the third has moved past it and left it in place


def test_what_is_forgotten_is_told_and_free_at_once() -> None:
    kv = coordinator(Retention(0), FULL, WINDOW)
    serve(kv, "1", prompt(640, 0, 1))
    batch = kv.events.since(0)
    assert batch is not None
    known: set[bytes] = set()
    for event in batch.events:
        if isinstance(event, BlocksStored) and event.group == 1:
            known |= set(event.hashes)
        elif isinstance(event, BlocksRemoved) and event.group == 1:
            known -= set(event.hashes)
    assert known == set(kv.pool.cache.index(1))
    assert len(known) == 3  # two positions at the end of the prompt, one block apart
    assert kv.num_free_blocks == kv.num_usable_blocks


def test_a_block_that_somebody_else_holds_stays() -> None:
    kv = coordinator(Retention(0), FULL, WINDOW)
    first = KVSequence("1", prompt(256, 0, 1))
    BlockHasher(b"test", 16).extend(first.hashes, first.token_ids)
    assert kv.allocate(first, num_new_tokens=64)
    kv.publish("1", 64)
    blocks = kv.tables.blocks("1")[1][:4]
    kv.pool.hold("lease", blocks[:1])
    assert kv.allocate(first, num_new_tokens=64)
    kv.publish("1", 128)
    kv.release_out_of_window("1", 128)
    assert [kv.pool.cache.has(block) for block in blocks] == [True, False, False, False]
    kv.pool.drop("lease")
    kv.check()


def test_an_interval_is_not_negative() -> None:
    with pytest.raises(ConfigError):
        Retention(-1)
