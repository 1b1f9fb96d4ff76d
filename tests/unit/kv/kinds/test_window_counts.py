"""Numbers worked out by hand: which blocks of a window exist, are held, and have to move."""

from collections.abc import Sequence

import pytest

from disagg.errors import ConfigError, InvariantViolation
from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.cross_attention import CrossAttentionSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout, plan_layout

FULL = FullAttentionSpec(16, 1, 8, 2)


def window(tokens: int, block_tokens: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_tokens, 1, 8, 2, tokens)


def coordinator(
    specs: Sequence[Spec], num_blocks: int = 1000, max_step_tokens: int = 4096
) -> KVCacheCoordinator:
    groups = tuple(KVCacheGroup(i, spec, (i,)) for i, spec in enumerate(specs))
    layout = KVCacheLayout(
        groups, max(spec.page_bytes for spec in specs), min(spec.block_tokens for spec in specs)
    )
    return KVCacheCoordinator(
        layout, num_blocks, max_model_tokens=200_000, max_step_tokens=max_step_tokens
    )


def request(key: str, num_tokens: int, first: int = 0, block_tokens: int = 16) -> KVSequence:
    made = KVSequence(key, list(range(first, first + num_tokens)))
    BlockHasher(b"test", block_tokens).extend(made.hashes, made.token_ids)
    return made


@pytest.mark.parametrize(
    ("num_tokens", "indexes"),
    [  # window 64: a query at position n sees n-63 .. n, so it needs n-63 .. n-1
        (1, [0]),
        (63, [0, 1, 2, 3]),  # shorter than the window
        (64, [0, 1, 2, 3]),  # equal: sees 1..63
        (65, [0, 1, 2, 3, 4]),  # one above: sees 2..64
        (78, [0, 1, 2, 3, 4]),  # sees 15: still in block 0
        (79, [1, 2, 3, 4]),  # sees 16: block 0 is out
        (80, [1, 2, 3, 4]),  # a full block ends
        (81, [1, 2, 3, 4, 5]),
        (6400, [396, 397, 398, 399]),  # many windows, on a block boundary
        (6401, [396, 397, 398, 399, 400]),
    ],
)
def test_in_window_blocks_of_a_prompt(num_tokens: int, indexes: list[int]) -> None:
    kv = coordinator([FULL, window(64)])
    reserved = kv.reserve_external(request("r", num_tokens), num_tokens)
    assert reserved is not None
    full, local = reserved.lacks
    assert [place for place, _ in full] == list(range(-(-num_tokens // 16)))
    assert [place for place, _ in local] == indexes
    assert all(block != NULL_BLOCK for _, block in (*full, *local))
    table = kv.tables.blocks("r")[1]
    assert table[: indexes[0]] == [NULL_BLOCK] * indexes[0]
    assert len(table) == -(-(num_tokens + 1) // 16)  # with room for the token to be computed
    kv.check()


def test_window_of_one_token_needs_nothing_from_before() -> None:
    kv = coordinator([FULL, window(1)])
    reserved = kv.reserve_external(request("r", 80), 80)
    assert reserved is not None
    assert reserved.lacks[1] == ()
    assert kv.tables.num_held("r") == (6, 1)


def test_the_window_moves_while_a_prompt_is_computed() -> None:
    kv = coordinator([FULL, window(64), window(64)])
    long = request("r", 400)
    held = []
    for computed in (128, 256, 384, 400):
        assert kv.allocate(long, num_new_tokens=computed - kv_computed(kv))
        held.append(kv.tables.num_held("r"))
        kv.publish("r", computed)
        kv.release_out_of_window("r", computed)
    assert held == [(8, 8, 8), (16, 12, 12), (24, 12, 12), (25, 5, 5)]
    assert kv.tables.num_held("r") == (25, 4, 4)  # position 400 sees 337..399: blocks 21..24
    kv.free("r")
    assert kv.num_free_blocks == kv.num_usable_blocks


def kv_computed(kv: KVCacheCoordinator) -> int:
    return kv.num_scheduled_tokens("r") if kv.managers[0].tables else 0


def test_two_equal_windows_are_looked_up_jointly() -> None:
    kv = coordinator([FULL, window(64), window(64)])
    first = request("a", 320)
    assert kv.allocate(first, num_new_tokens=320)
    kv.publish("a", 320)
    hit = kv.find_longest_cache_hit(request("b", 320), 319)
    assert hit.num_tokens == 304
    assert [len(ids) - ids.count(NULL_BLOCK) for ids in hit.block_ids] == [19, 4, 4]
    # Without one block of one group its windows over that block are gone for both.
    lost = kv.tables.blocks("a")[2][17]
    del kv.pool.cache._index[2][first.hashes[17]]
    kv.pool.cache._value_of[lost] = None
    hit = kv.find_longest_cache_hit(request("b", 320), 319)
    assert hit.num_tokens == 17 * 16


def test_a_model_of_windows_only() -> None:
    kv = coordinator([window(64)], num_blocks=16)
    assert kv.admit("r", 10_000) is False  # one step of 4096 tokens does not fit in 15 blocks
    kv = coordinator([window(64)], num_blocks=16, max_step_tokens=64)
    long = request("r", 10_000)
    assert kv.admit("r", 10_000)
    while kv_computed(kv) < 10_000:
        assert kv.allocate(long, num_new_tokens=min(64, 10_000 - kv_computed(kv)))
        kv.publish("r", kv_computed(kv))
        kv.check()
    kv.free("r")
    assert kv.num_free_blocks == 15
    again = kv.find_longest_cache_hit(request("s", 10_000), 9_999)
    assert again.num_tokens == 9_984  # its last window is all that is left, and enough
    assert len(again.block_ids[0]) - again.block_ids[0].count(NULL_BLOCK) == 4


def gemma_3_4b() -> list[Spec]:
    """34 layers, every sixth global (5 of them), window 1024, 4 KV heads of 256, bf16."""
    return [
        FullAttentionSpec(16, 4, 256, 2)
        if layer % 6 == 5
        else SlidingWindowSpec(16, 4, 256, 2, 1024)
        for layer in range(34)
    ]


def test_gemma_groups() -> None:
    layout = plan_layout(gemma_3_4b())
    sizes = [len(group.layers) for group in layout.groups]
    assert sorted(sizes, reverse=True) == [5, 5, 5, 5, 5, 5, 4]
    assert sum(isinstance(group.spec, FullAttentionSpec) for group in layout.groups) == 1
    page = 2 * 4 * 16 * 256 * 2
    assert layout.block_bytes == 5 * page
    assert sorted(layout.padding_bytes(g) for g in range(7)) == [0, 0, 0, 0, 0, 0, page]
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(34))


def test_70k_prefix_fits_where_all_layers_full_would_not() -> None:
    """The window-exact reservation of a long external prefix against full tables everywhere."""
    prefix = 69_888  # 4368 blocks
    full_everywhere = 7 * 4_369
    exact = 4_369 + 6 * (64 + 1)  # 64 blocks cover 68_865 .. 69_887, and one for the next token
    num_blocks = exact + 1
    assert num_blocks < full_everywhere / 6
    print(f"blocks: window-exact {exact}, all layers full {full_everywhere}")

    kv = KVCacheCoordinator(
        plan_layout(gemma_3_4b()), num_blocks, max_model_tokens=131_072, max_step_tokens=2_048
    )
    reserved = kv.reserve_external(request("r", 70_000), prefix)
    assert reserved is not None
    assert sorted(map(len, reserved.lacks)) == [64] * 6 + [4368]
    assert sorted(kv.tables.num_held("r")) == [65] * 6 + [4369]
    assert kv.num_free_blocks == 0
    kv.commit_external("r")
    kv.check()
    kv.free("r")
    assert kv.num_free_blocks == exact

    all_full = plan_layout([FullAttentionSpec(16, 4, 256, 2)] * 34)
    same_bytes = num_blocks * kv.layout.block_bytes // all_full.block_bytes
    other = KVCacheCoordinator(
        all_full, same_bytes, max_model_tokens=131_072, max_step_tokens=2_048
    )
    assert other.reserve_external(request("r", 70_000), prefix) is None


def test_a_decode_worker_holds_its_full_attention_hits() -> None:
    kv = coordinator([FULL, window(64)])
    first = request("a", 160)
    assert kv.allocate(first, num_new_tokens=160)
    kv.publish("a", 160)
    kv.free("a")
    free = kv.num_free_blocks
    second = request("b", 320)
    reserved = kv.reserve_external(second, 320)
    assert reserved is not None
    assert reserved.hit_tokens == (160, 0)
    assert [place for place, _ in reserved.lacks[0]] == list(range(10, 20))
    assert [place for place, _ in reserved.lacks[1]] == [16, 17, 18, 19]
    assert free - kv.num_free_blocks == 21 + 5
    # Nothing of it may be found or computed on before the commit.
    assert kv.find_longest_cache_hit(request("c", 320), 319).num_tokens == 160
    with pytest.raises(InvariantViolation):
        kv.publish("b", 320)
    with pytest.raises(InvariantViolation):
        kv.allocate(second, num_new_tokens=1)
    kv.commit_external("b")
    assert kv.find_longest_cache_hit(request("c", 321), 320).num_tokens == 320
    kv.check()


def test_a_whole_prompt_can_be_a_full_attention_hit() -> None:
    kv = coordinator([FULL])
    assert kv.allocate(request("a", 160), num_new_tokens=160)
    kv.publish("a", 160)
    reserved = kv.reserve_external(request("b", 160), 160)
    assert reserved is not None
    assert reserved.hit_tokens == (160,)
    assert reserved.lacks == ((),)


def test_a_refused_reservation_changes_nothing() -> None:
    kv = coordinator([FULL, window(64)], num_blocks=12)
    assert kv.reserve_external(request("b", 320), 320) is None
    assert kv.num_free_blocks == 11
    kv.check()


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        MLASpec(16, 1, 8, 2),
        window(64),
        ChunkedLocalSpec(16, 1, 8, 2, 64),
        LinearStateSpec(16, 512),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_every_kind_through_every_path(spec: Spec) -> None:
    kv = coordinator([spec], num_blocks=64, max_step_tokens=160)
    first = request("a", 160)
    assert kv.admit("a", 160)
    assert kv.allocate(first, num_new_tokens=80)
    kv.hold_step(1, ["a"])
    kv.release_step(1)
    kv.publish("a", 80)
    assert kv.allocate(first, num_new_tokens=80)
    kv.publish("a", 160)
    kv.release_out_of_window("a", 160)
    assert kv.find_longest_cache_hit(request("b", 160), 160).num_tokens == 160
    assert kv.group_hit_tokens(request("b", 160)) == (160,)
    assert kv.events.snapshot().hashes[0]
    kv.free("a")
    kv.free("a")
    reserved = kv.reserve_external(request("b", 160, first=999), 160)
    assert reserved is not None
    assert reserved.lacks[0] or isinstance(spec, ChunkedLocalSpec)
    kv.check()
    kv.commit_external("b")
    kv.free("b")
    kv.check()
    assert kv.num_free_blocks == kv.num_usable_blocks


def test_kinds_that_cannot_be_eagle_groups_are_refused_by_name() -> None:
    for spec in (
        ChunkedLocalSpec(16, 1, 8, 2, 64),
        CrossAttentionSpec(16, 1, 8, 2, 40),
    ):
        with pytest.raises(ConfigError, match=f"{type(spec).__name__} cannot be an EAGLE group"):
            KVCacheCoordinator(
                plan_layout([spec]),
                9,
                max_model_tokens=64,
                max_step_tokens=64,
                eagle_groups=[0],
            )


def test_states_prove_nothing_further_as_eagle_groups() -> None:
    """The tokens' group gives up the block that proves the rest; the state there must exist."""
    specs: list[Spec] = [FULL, LinearStateSpec(16, 64)]
    groups = tuple(KVCacheGroup(i, spec, (i,)) for i, spec in enumerate(specs))
    kv = KVCacheCoordinator(
        KVCacheLayout(groups, 512, 16),
        99,
        max_model_tokens=640,
        max_step_tokens=64,
        eagle_groups=[0, 1],
    )
    made = request("a", 80)
    for new in (32, 16, 32):  # states at 32, 48 and 80
        assert kv.allocate(made, num_new_tokens=new)
        kv.publish("a", kv.num_scheduled_tokens("a"))
    assert kv.find_longest_cache_hit(request("b", 65), 64).num_tokens == 48
    assert kv.find_longest_cache_hit(request("b", 70), 69).num_tokens == 48
    # 80 is cached in both groups, but nothing beyond it proves the tokens' group.
    assert kv.find_longest_cache_hit(request("b", 100), 99).num_tokens == 48
