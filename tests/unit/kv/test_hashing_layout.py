"""Chain values, and where pages lie."""

from hashlib import sha256

import pytest

from disagg.errors import ConfigError, RequestError
from disagg.kv.blocks.free_blocks import UncachedBlocks
from disagg.kv.hashing import BlockHasher, block_hash_key, tenant_salt
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout, plan_layout

FULL = FullAttentionSpec(16, 8, 64, 2)


def values(hasher: BlockHasher, tokens: list[int], salt: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    hasher.extend(hashes, tokens, salt)
    return hashes


def test_chain_is_what_the_docstring_says() -> None:
    hasher = BlockHasher(b"key", 4)
    tokens = [1, 2, 3, 4, 5, 6, 7, 70_000, 9]
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    first = sha256(hasher.seed() + packed[:16]).digest()
    assert values(hasher, tokens) == [first, sha256(first + packed[16:32]).digest()]


def test_growing_is_the_same_as_at_once() -> None:
    hasher, tokens, hashes = BlockHasher(b"key", 4), list(range(50)), list[bytes]()
    for end in (3, 4, 5, 17, 50):
        hasher.extend(hashes, tokens[:end])
    assert hashes == values(hasher, tokens)
    assert len(hashes) == 12


def test_key_salt_block_size_and_every_earlier_token_matter() -> None:
    tokens = list(range(16))
    seen = {
        values(BlockHasher(b"key", 4), tokens)[-1],
        values(BlockHasher(b"other", 4), tokens)[-1],
        values(BlockHasher(b"key", 4), tokens, b"tenant")[-1],
        values(BlockHasher(b"key", 8), tokens)[-1],
        values(BlockHasher(b"key", 4), [99, *tokens[1:]])[-1],
    }
    assert len(seen) == 5
    assert (
        values(BlockHasher(b"key", 4), [*tokens[:8], 0, 0, 0, 0])[:2]
        == values(BlockHasher(b"key", 4), tokens)[:2]
    )


@pytest.mark.parametrize("bad", [-1, 2**32, "x"])
def test_a_bad_token_is_refused_and_changes_nothing(bad: object) -> None:
    hashes: list[bytes] = []
    with pytest.raises(RequestError, match="token id"):
        BlockHasher(b"key", 2).extend(hashes, [1, 2, 3, bad])  # type: ignore[list-item]
    assert hashes == []


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="hash_key"):
        BlockHasher(b"", 16)


SECRET = "a secret that is long enough to be one"


def test_the_key_needs_the_clusters_secret_and_differs_by_model() -> None:
    made = {
        block_hash_key(SECRET, "m"),
        block_hash_key(SECRET, "n"),
        block_hash_key(SECRET * 2, "m"),
    }
    assert len(made) == 3
    for secret in ("", "m", SECRET[:31]):
        with pytest.raises(ConfigError) as caught:
            block_hash_key(secret, "m")
        assert SECRET[:31] not in caught.value.message


def test_a_scheme_tells_keys_apart_and_is_no_part_of_any_chain() -> None:
    hasher, same, other = (
        BlockHasher(block_hash_key(s, "m"), 4) for s in (SECRET, SECRET, SECRET * 2)
    )
    assert hasher.scheme == same.scheme != other.scheme
    assert BlockHasher(block_hash_key(SECRET, "m"), 8).scheme != hasher.scheme
    mark = hasher.scheme.rpartition(":")[2]
    assert mark not in hasher.seed().hex() + block_hash_key(SECRET, "m").hex()


def test_salts_of_tenants_are_told_apart_whatever_clients_send() -> None:
    pairs = [
        ("", ""),
        ("a", ""),
        ("", "a"),
        ("a", "b"),
        ("ab", ""),
        ("", "ab"),
        ("a", "bc"),
        ("ab", "c"),
    ]
    assert len({tenant_salt(*pair) for pair in pairs}) == len(pairs)
    assert tenant_salt("", "") == b""
    assert tenant_salt("a", "b") == tenant_salt("a", "b")


def test_pages_of_a_group_are_contiguous() -> None:
    window = SlidingWindowSpec(16, 8, 64, 2, 128)
    layout = plan_layout([window, window, FULL, window, window, FULL])
    assert [group.layers for group in layout.groups] == [(0, 3), (1, 4), (2, 5)]
    page = 2 * 8 * 16 * 64 * 2
    assert layout.block_bytes == 2 * page
    assert [layout.page_offset(layer) for layer in range(6)] == [0, 0, 0, page, page, page]
    assert [layout.group_of(layer) for layer in range(6)] == [0, 1, 2, 0, 1, 2]
    assert all(layout.padding_bytes(group) == 0 for group in range(3))


def test_unequal_pages_share_one_block_size() -> None:
    narrow = FullAttentionSpec(16, 2, 64, 2)  # a quarter of FULL's page
    layout = plan_layout([FULL, narrow, narrow, narrow, narrow])
    assert [group.layers for group in layout.groups] == [(0,), (1, 2, 3, 4)]
    assert [layout.padding_bytes(group) for group in range(2)] == [0, 0]


def test_kinds_with_other_page_sizes() -> None:
    assert MLASpec(16, 1, 576, 2).page_bytes == 16 * 576 * 2
    # FULL's page has 2 * 8 * 16 * 64 * 2 = 32,768 bytes: a state of 100,000 takes 4 of them.
    layout = plan_layout([LinearStateSpec(16, 100_000), FULL, None])
    assert layout.block_bytes == 32_768
    assert [group.blocks_per_state for group in layout.groups] == [4, 1]
    assert [layout.useful_bytes(group) for group in range(2)] == [25_000, 32_768]
    assert [layout.padding_bytes(group) for group in range(2)] == [7_768, 0]


def test_only_states_span_blocks() -> None:
    with pytest.raises(ConfigError, match="FullAttentionSpec has no states"):
        KVCacheLayout((KVCacheGroup(0, FULL, (0,), 2),), FULL.page_bytes, 16)
    state = LinearStateSpec(16, 100_000)
    with pytest.raises(ConfigError, match="needs 100000 bytes, 3 block"):
        KVCacheLayout((KVCacheGroup(0, state, (0,), 3),), 32_768, 16)


def test_states_alone_need_no_lists() -> None:
    layout = plan_layout([LinearStateSpec(16, 1_000)] * 3)
    assert [(g.layers, g.blocks_per_state) for g in layout.groups] == [((0, 1, 2), 1)]
    assert (layout.block_bytes, layout.padding_bytes(0)) == (3_000, 0)


def test_few_groups_are_worth_a_little_padding_but_not_much() -> None:
    # 10 full and 52 window layers (Gemma-3 27B): groups of 13 would be five, but every token
    # would pay 3 of 13 pages for nothing.
    window = SlidingWindowSpec(16, 8, 64, 2, 1024)
    layout = plan_layout([FULL if layer % 6 == 5 else window for layer in range(62)])
    assert sorted(len(group.layers) for group in layout.groups) == [8, 8, 9, 9, 9, 9, 10]
    assert layout.block_bytes == 10 * FULL.page_bytes


@pytest.mark.parametrize("block_tokens", [24, 48])
def test_block_sizes_that_are_no_powers_of_two_times_a_base_are_refused(block_tokens: int) -> None:
    with pytest.raises(ConfigError, match="powers of two"):
        plan_layout([FULL, SlidingWindowSpec(block_tokens, 8, 64, 2, 128)])


def test_block_sizes_may_differ() -> None:
    layout = plan_layout([FULL, SlidingWindowSpec(64, 2, 64, 2, 128)])
    assert layout.hash_block_tokens == 16


@pytest.mark.parametrize("field", ["block_tokens", "num_kv_heads", "head_size", "dtype_bytes"])
def test_specs_name_the_bad_field(field: str) -> None:
    good = {"block_tokens": 16, "num_kv_heads": 8, "head_size": 64, "dtype_bytes": 2}
    with pytest.raises(ConfigError, match=field):
        FullAttentionSpec(**{**good, field: 0})


def test_a_layer_in_two_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer 1 is in two groups"):
        KVCacheLayout(
            (KVCacheGroup(0, FULL, (0, 1)), KVCacheGroup(1, FULL, (1,))), 2 * FULL.page_bytes, 16
        )


def test_uncached_blocks_leave_in_runs() -> None:
    free = UncachedBlocks(1, 101)
    assert free.take(4) == [1, 2, 3, 4]
    scattered = free.take(50)[::2]
    free.add(scattered)
    assert free.take(30) == list(range(55, 85))  # a run, though the loose ones came back last
    assert free.take(2) == scattered[-2:]
    rest = free.take(len(free))
    assert sorted(rest) == rest
    assert len(free) == 0
