"""Bytes by the router's rule equal those of the coordinator that moves them."""

import random
from collections.abc import Sequence

import pytest

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.messages.registration import GroupInfo, WorkerInfo
from disagg.routing.estimates.kv_bytes import blocks_seen, handover_bytes, pull_bytes, tokens_of
from tests.unit.routing.builders import CONTRACT, worker

FULL = FullAttentionSpec(16, 1, 8, 2)
LAYOUTS: tuple[tuple[Spec, ...], ...] = (
    (FULL,),
    (FULL, SlidingWindowSpec(16, 1, 8, 2, 64)),
    (FULL, SlidingWindowSpec(16, 1, 8, 2, 50), SlidingWindowSpec(16, 1, 8, 2, 1)),
    (FULL, ChunkedLocalSpec(16, 1, 8, 2, 48)),
    (FULL, ChunkedLocalSpec(16, 1, 8, 2, 40)),
    (FULL, LinearStateSpec(16, 512)),
    (MLASpec(16, 1, 8, 2), SlidingWindowSpec(16, 1, 8, 2, 33)),
)


def coordinator(specs: Sequence[Spec]) -> KVCacheCoordinator:
    groups = tuple(KVCacheGroup(i, spec, (i,)) for i, spec in enumerate(specs))
    layout = KVCacheLayout(groups, max(spec.page_bytes for spec in specs), 16)
    return KVCacheCoordinator(layout, 1000, max_model_tokens=10_000, max_step_tokens=4096)


def info_of(specs: Sequence[Spec]) -> WorkerInfo:
    groups = tuple(GroupInfo(s.kind, s.block_tokens, s.window_tokens, 1, 1) for s in specs)
    return worker("w", groups=groups, contract=CONTRACT)


def request(key: str, num_tokens: int) -> KVSequence:
    made = KVSequence(key, list(range(num_tokens)))
    BlockHasher(b"test", 16).extend(made.hashes, made.token_ids)
    return made


def moved(specs: Sequence[Spec], num_tokens: int, num_held: int) -> list[int]:
    """Blocks per group that a decode worker lacks that has computed a prefix itself before."""
    kv = coordinator(specs)
    if num_held:
        first = request("first", num_held)
        assert kv.allocate(first, num_new_tokens=num_held)
        kv.publish("first", num_held)
        kv.free("first")
    reserved = kv.reserve_external(request("r", num_tokens), num_tokens)
    assert reserved is not None
    return [len(lacks) for lacks in reserved.lacks]


@pytest.mark.parametrize("specs", LAYOUTS)
def test_a_hand_over_moves_what_the_coordinator_lacks(specs: tuple[Spec, ...]) -> None:
    info, rng = info_of(specs), random.Random(5)
    lengths = [1, 15, 16, 17, 47, 48, 49, 63, 64, 65, 79, 80, 81, 400]
    for num_tokens in (*lengths, *(rng.randint(1, 500) for _ in range(30))):
        held = rng.randint(0, num_tokens - 1) // 16 * 16
        found, at_end = handover_bytes(info, num_tokens, held, 10)
        blocks = moved(specs, num_tokens, held)
        assert found == sum(blocks) * CONTRACT.block_bytes, (num_tokens, held, blocks)
        assert sum(blocks[1:]) * CONTRACT.block_bytes <= at_end <= found


def test_a_rule_that_forgets_the_window_is_seen() -> None:
    """Negative control: with the windows taken away the bytes are others."""
    specs = LAYOUTS[1]
    everything = [FULL, FULL]
    assert sum(moved(everything, 400, 0)) != sum(moved(specs, 400, 0))
    found, _ = handover_bytes(info_of(everything), 400, 0, 10)
    assert found == sum(moved(everything, 400, 0)) * CONTRACT.block_bytes


def test_states_of_several_blocks_move_whole() -> None:
    info = info_of(LAYOUTS[5])
    assert blocks_seen(info.groups[1], 100) == 1
    assert handover_bytes(info, 100, 0, 10)[0] == (7 + 1) * CONTRACT.block_bytes


def test_what_can_be_read_early_is_all_but_the_last_chunk() -> None:
    info = info_of((FULL,))
    assert handover_bytes(info, 160, 0, 160) == (10 * 1024, 10 * 1024), "one chunk"
    assert handover_bytes(info, 160, 0, 32) == (10 * 1024, 2 * 1024)
    assert handover_bytes(info, 160, 144, 64) == (1024, 1024), "no more than is moved"


def test_a_pull_takes_hits_of_all_kinds() -> None:
    info = info_of(LAYOUTS[1])
    assert pull_bytes(info, 160, 0) == (10 + 4) * 1024
    assert pull_bytes(info, 160, 144) == (1 + 1) * 1024
    assert pull_bytes(info, 160, 160) == 0


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[6]])
def test_bytes_are_as_many_tokens_as_would_fill_them_in_all_groups(layout: Sequence[Spec]) -> None:
    info = info_of(layout)
    everything = len(layout) * 10 * CONTRACT.block_bytes
    assert tokens_of(info, everything) == 160
    assert tokens_of(info, 0) == 0
