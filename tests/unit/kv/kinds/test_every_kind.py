"""Every kind of layer through every path; a new kind fails here until it has them all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.event_publishing import VllmEventShape
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.cross_attention import CrossAttentionSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.registry import KINDS
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout, plan_layout
from disagg.kv.shapes.memory_plan import all_layers_full, plan_memory
from disagg.messages.kv_events import BlocksStored
from disagg.messages.registration import GroupInfo
from disagg.routing.index import check_group

HASHER = BlockHasher(b"kinds", 4)


@dataclass
class Kind:
    """What a request of 10 tokens (blocks of 4) does to a group of this kind.

    Attributes:
        spec: an example: window of 5, chunks of 8, states of two blocks.
        held: blocks held while its 10 tokens are computed in steps of 8 and 2, and after them.
        seen: positions that a query at 10 reads.
        hit: positions of the hit of 8 tokens that must be there; None if there are no hits.
        stored: (first token, token after the last) of each stored event.
    """

    spec: Spec
    held: tuple[int, int, int]
    seen: list[int]
    hit: list[int] | None
    stored: list[tuple[int, int]]


EXPECTED: dict[type[Any], Kind] = {
    FullAttentionSpec: Kind(FullAttentionSpec(4, 2, 4, 2), (2, 3, 3), [0, 1, 2], [0, 1], [(0, 8)]),
    MLASpec: Kind(MLASpec(4, 1, 16, 2), (2, 3, 3), [0, 1, 2], [0, 1], [(0, 8)]),
    # At 10 the positions 6 .. 10 are seen; for a hit of 8 the 4 tokens before it.
    SlidingWindowSpec: Kind(SlidingWindowSpec(4, 2, 4, 2, 5), (2, 2, 2), [1, 2], [1], [(0, 8)]),
    # At 10 the chunk that began at 8; a hit of 8 begins a chunk.
    ChunkedLocalSpec: Kind(ChunkedLocalSpec(4, 2, 4, 2, 8), (2, 1, 1), [2], [], [(0, 8)]),
    # Two blocks per state: entries 4 and 5 are the state at 12, 2 and 3 the one at 8.
    LinearStateSpec: Kind(LinearStateSpec(4, 200), (2, 4, 2), [4, 5], [2, 3], [(4, 8)]),
    # Six encoder outputs in two blocks, whatever the tokens; never found, never announced.
    CrossAttentionSpec: Kind(CrossAttentionSpec(4, 2, 4, 2, 6), (2, 2, 2), [0, 1], None, []),
}


def coordinator(spec: Spec) -> KVCacheCoordinator:
    """A model of this one kind, and of no other."""
    blocks = 1 if spec.visible_tokens(64) else 2
    group = KVCacheGroup(0, spec, (0,), blocks)
    return KVCacheCoordinator(
        KVCacheLayout((group,), 128, 4),
        32,
        max_model_tokens=64,
        max_step_tokens=16,
        events_with_tokens=True,
    )


def request(key: str) -> KVSequence:
    made = KVSequence(key, list(range(100, 112)))
    HASHER.extend(made.hashes, made.token_ids)
    return made


def computed(kv: KVCacheCoordinator, key: str) -> list[int]:
    """Compute 10 tokens in two steps; the number of blocks held on the way."""
    made = request(key)
    held: list[int] = []
    for new, done in ((8, 8), (2, 10)):
        assert kv.allocate(made, num_new_tokens=new)
        held += kv.tables.num_held(key)
        kv.hold_step(done, [key])
        kv.publish(key, done)
        kv.release_out_of_window(key, done)
        kv.release_step(done)
        kv.check()
    return [*held, *kv.tables.num_held(key)]


def allocate(kind: Kind) -> None:
    kv = coordinator(kind.spec)
    assert kv.admission.num_needed("r", 8, None, 0, False) == kind.held[0]
    assert tuple(computed(kv, "r")) == kind.held


def admit(kind: Kind) -> None:
    kv = coordinator(kind.spec)
    assert kv.admit("r", 12)
    promised = kv.num_free_blocks - kv.num_available_blocks
    assert max(computed(kv, "r")) <= promised
    kv.free("r")
    assert kv.num_available_blocks == kv.num_usable_blocks


def match(kind: Kind) -> None:
    kv = coordinator(kind.spec)
    # At 8 a chunk begins: it needs nothing, so an empty cache has it.
    assert kv.find_longest_cache_hit(request("r"), 11).num_tokens == (8 if kind.hit == [] else 0)
    computed(kv, "r")
    hit = kv.find_longest_cache_hit(request("s"), 11)
    assert hit.num_tokens == (0 if kind.hit is None else 8)
    found = [place for place, block in enumerate(hit.block_ids[0]) if block != NULL_BLOCK]
    assert set(kind.hit or ()) <= set(found)
    assert kv.group_hit_tokens(request("s")) == (hit.num_tokens,)
    assert kv.allocate(request("s"), num_new_tokens=2, hit=hit)
    kv.check()


def external(kind: Kind) -> None:
    kv = coordinator(kind.spec)
    reserved = kv.reserve_external(request("r"), 10)
    assert reserved is not None
    assert [place for place, _ in reserved.lacks[0]] == kind.seen
    kv.commit_external("r")
    assert kv.allocate(request("r"), num_new_tokens=1)
    kv.check()


def publish(kind: Kind) -> None:
    kv = coordinator(kind.spec)
    computed(kv, "r")
    values = kv.pool.cache.index(0)
    assert set(values) <= set(request("s").hashes[:2])
    assert (request("s").hashes[1] in values) == (kind.hit is not None)


def transfer(kind: Kind) -> None:
    kv = coordinator(kind.spec)
    computed(kv, "r")
    (blocks,) = kv.tables.in_window_blocks("r", 10)
    assert [place for place, _ in blocks] == kind.seen
    table = kv.tables.blocks("r")[0]
    assert all(table[place] == block != NULL_BLOCK for place, block in blocks)
    kv.pool.hold("lease", [block for _, block in blocks])
    kv.free("r")
    assert kv.num_free_blocks == kv.num_usable_blocks - len(blocks)
    kv.pool.drop("lease")
    kv.check()


def tier(kind: Kind) -> None:
    """What a tier copies out stays until it is copied; what it copies in counts when it is in."""
    kv = coordinator(kind.spec)
    computed(kv, "r")
    hit = kv.find_longest_cache_hit(request("s"), 11)
    cached = sorted({*hit.block_ids[0], *kv.pool.cache.index(0).values()} - {NULL_BLOCK})
    assert bool(cached) == (kind.hit is not None)
    kv.pool.hold(("tier-write", 1), cached)
    kv.free("r")
    others = kv.pool.allocate(kv.num_free_blocks)  # everybody else's memory is needed
    assert not set(others) & set(cached)
    assert all(map(kv.pool.cache.has, cached))
    kv.pool.release(others)
    kv.pool.drop(("tier-write", 1))
    kv.check()

    for number, arrives in enumerate([False, True]):
        kv = coordinator(kind.spec)
        reserved = kv.reserve_external(request("r"), 8)
        assert reserved is not None
        kv.pool.hold(("tier-read", number), [block for _, block in reserved.lacks[0]])
        assert not kv.pool.cache.index(0), "found before it is there"
        if arrives:
            kv.commit_external("r")
        kv.free("r")
        kv.check()
        assert kv.num_free_blocks == kv.num_usable_blocks - len(reserved.lacks[0])
        kv.pool.drop(("tier-read", number))
        kv.check()
        assert kv.num_free_blocks == kv.num_usable_blocks
        found = kv.find_longest_cache_hit(request("s"), 11).num_tokens
        assert found == (8 if kind.hit == [] or (kind.hit and arrives) else 0)


def events(kind: Kind) -> None:
    kv = coordinator(kind.spec)
    computed(kv, "r")
    batch = kv.events.since(0)
    assert batch is not None
    stored = [event for event in batch.events if isinstance(event, BlocksStored)]
    ends = [e.first_position + len(e.hashes) * e.block_tokens for e in stored]
    firsts = [event.first_position for event in stored]
    assert list(zip(firsts, ends, strict=True)) == kind.stored
    _, wire, _ = VllmEventShape(kv.layout.groups).batch(0.0, batch.events)
    assert isinstance(wire, list)
    tokens = [list(range(100 + first, 100 + end)) for first, end in kind.stored]
    assert [event["token_ids"] for event in wire] == tokens
    kinds = [event["kv_cache_spec_kind"] for event in wire]
    assert kinds == [kind.spec.vllm_kind] * len(kind.stored)


def free(kind: Kind) -> None:
    kv = coordinator(kind.spec)
    computed(kv, "r")
    kv.free("r")
    kv.check()
    assert kv.num_free_blocks == kv.num_usable_blocks
    taken = kv.pool.allocate(kv.num_usable_blocks)  # everything cached is evicted
    kv.pool.release(taken)
    assert kv.events.snapshot().hashes == ((),)


def names(kind: Kind) -> None:
    spec = kind.spec
    info = GroupInfo(spec.kind, 4, spec.window_tokens, 1, 128)
    if kind.hit is None:  # routers know no model without hits
        with pytest.raises(ConfigError, match="cross_attention"):
            check_group(info, 4)
    else:
        check_group(info, 4)
    assert spec.vllm_kind


def layout(kind: Kind) -> None:
    specs = [kind.spec, FullAttentionSpec(4, 2, 4, 2), kind.spec]
    made = plan_layout(specs)
    assert sorted(layer for group in made.groups for layer in group.layers) == [0, 1, 2]
    plan = plan_memory(specs, 1 << 20, 64)
    full = plan_memory(all_layers_full(specs), 1 << 20, 64)
    assert plan.num_tokens > 0
    assert full.num_tokens > 0


PATHS: list[Callable[[Kind], None]] = [
    allocate,
    admit,
    match,
    external,
    publish,
    transfer,
    tier,
    events,
    free,
    names,
    layout,
]


def test_the_kinds_are_all_here() -> None:
    assert set(KINDS.values()) == EXPECTED.keys()
    assert len({kind.spec.kind for kind in EXPECTED.values()}) == len(EXPECTED)
    assert len({kind.spec.vllm_kind for kind in EXPECTED.values()}) == len(EXPECTED)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kind_and_path(kind: type[Any], path: Callable[[Kind], None]) -> None:
    path(EXPECTED[kind])
