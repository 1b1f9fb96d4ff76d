"""The prefix index against brute force and against the coordinator that workers really use."""

import random

import pytest

from disagg.errors import ConfigError
from disagg.kv.blocks.hits import CacheHit
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import (
    WHOLE,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    SnapshotPart,
)
from disagg.messages.registration import GroupInfo
from disagg.routing import prefix_hits
from disagg.routing.index import PrefixIndex

A, B = Incarnation("a", "1"), Incarnation("b", "1")
KINDS = ("full_attention", "mla", "sliding_window", "chunked_local", "linear_state")


def group(kind: str, block_tokens: int = 4, window_tokens: int = 0) -> GroupInfo:
    return GroupInfo(kind, block_tokens, window_tokens, 1, 64)


def chain(num_tokens: int, hash_tokens: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(b"k", hash_tokens).extend(hashes, range(num_tokens))
    return hashes


def first_needed(info: GroupInfo, end: int) -> int:
    """First token that the query at position ``end`` still needs from the cache."""
    if info.kind == "sliding_window":
        return max(0, end - info.window_tokens + 1)
    if info.kind == "chunked_local":
        return end // info.window_tokens * info.window_tokens
    return end - 1 if info.kind == "linear_state" else 0


def brute_force(
    groups: list[GroupInfo],
    held: set[tuple[int, bytes]],
    num_tokens: int,
    hashes: list[bytes],
    hash_tokens: int,
) -> tuple[int, tuple[int, ...]]:
    """Longest end at which every token that is needed lies in a held block, in all groups."""

    def agrees(number: int, end: int) -> bool:
        info = groups[number]
        if end % info.block_tokens:
            return False
        stride = info.block_tokens // hash_tokens
        first = first_needed(info, end) // info.block_tokens
        return all(
            (number, hashes[(i + 1) * stride - 1]) in held
            for i in range(first, end // info.block_tokens)
        )

    ends = range(hash_tokens, len(hashes) * hash_tokens + 1, hash_tokens)
    everybody = range(len(groups))
    usable = [e for e in ends if e < num_tokens and all(agrees(g, e) for g in everybody)]
    alone = [[e for e in ends if agrees(g, e)] for g in everybody]
    return max(usable, default=0), tuple(max(found, default=0) for found in alone)


def random_groups(rng: random.Random) -> list[GroupInfo]:
    groups = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(KINDS)
        block = rng.choice((4, 8, 16)) if kind != "chunked_local" else rng.choice((4, 8))
        window = 0
        if kind == "sliding_window":
            window = rng.randint(1, 40)
        elif kind == "chunked_local":
            window = rng.choice((8, 16, 24))
        groups.append(group(kind, block, window))
    return groups


def check_against_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    groups = random_groups(rng)
    index = PrefixIndex(groups, 4)
    hashes = chain(4 * rng.randint(1, 24))
    num_tokens = len(hashes) * 4 + rng.randint(0, 3)
    held: dict[Incarnation, set[tuple[int, bytes]]] = {}
    for number in range(4):
        worker = Incarnation(str(number), "1")
        index.add(worker, 1000)
        held[worker] = set()
    for _ in range(rng.randint(1, 60)):
        worker = rng.choice(list(held))
        number = rng.randrange(len(groups))
        stride = groups[number].block_tokens // 4
        blocks = hashes[stride - 1 :: stride]
        first = rng.randint(0, len(blocks))
        run = tuple(blocks[first : first + rng.randint(1, 24)])
        keys = {(number, value) for value in run}
        if rng.random() < 0.8:
            event: KVEvent = BlocksStored(number, run, None, first * groups[number].block_tokens, 4)
            held[worker] |= keys
        else:
            event = BlocksRemoved(number, run)
            held[worker] -= keys
        if rng.random() < 0.02:
            event = AllCleared()
            held[worker] = set()
        if rng.random() < 0.02:
            index.remove(worker)  # its slot is used again
            index.add(worker, 1000)
            held[worker] = set()
            continue
        assert index.apply(worker, index.next_sequence(worker), None, (event,))
    found = index.match(num_tokens, hashes)
    for worker, keys in held.items():
        expected = brute_force(groups, keys, num_tokens, hashes, 4)
        assert (found[worker].usable_tokens, found[worker].group_tokens) == expected, (
            f"seed {seed}: {groups}"
        )
        visible = found.always_visible_by(worker)
        assert visible == always_visible(groups, keys, hashes), f"seed {seed}: {groups}"
        assert index.num_entries(worker) == len(keys), f"seed {seed}"


def always_visible(
    groups: list[GroupInfo], held: set[tuple[int, bytes]], hashes: list[bytes]
) -> int:
    """Longest end at which the groups agree of which a query needs everything."""
    seeing = [n for n, info in enumerate(groups) if info.kind in ("full_attention", "mla")]
    keys = {(seeing.index(n), value) for n, value in held if n in seeing}
    chosen = [groups[n] for n in seeing]
    return brute_force(chosen, keys, 4 * len(hashes) + 1, hashes, 4)[0] if chosen else 0


def test_equals_brute_force() -> None:
    for seed in range(400):
        check_against_brute_force(seed)


def test_control_a_window_taken_for_a_full_prefix_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlidingWindowSpec, "first_needed", FullAttentionSpec.first_needed)
    with pytest.raises(AssertionError, match="seed"):
        test_equals_brute_force()


def test_control_a_state_that_counts_as_always_visible_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_hits, "sees_everything", lambda info: info.window_tokens == 0)
    with pytest.raises(AssertionError, match="seed"):
        test_equals_brute_force()


def test_control_a_window_taken_one_block_short_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SlidingWindowSpec.first_needed
    monkeypatch.setattr(
        SlidingWindowSpec, "first_needed", lambda info, n: min(n, right(info, n) + 1)
    )
    with pytest.raises(AssertionError, match="seed"):
        test_equals_brute_force()


def test_an_evicted_window_block_shortens_the_usable_prefix_only() -> None:
    index = PrefixIndex([group("full_attention"), group("sliding_window", 4, 9)], 4)
    index.add(A, 100)
    hashes = tuple(chain(40))
    for number in range(2):
        index.apply(A, number, None, [BlocksStored(number, hashes, None, 0, 4)])
    assert index.match(41, hashes)[A].usable_tokens == 40
    index.apply(A, 2, None, [BlocksRemoved(1, hashes[8:9])])
    hit = index.match(41, hashes)[A]
    assert (hit.usable_tokens, hit.group_tokens) == (32, (40, 32))
    index.apply(A, 3, None, [BlocksRemoved(1, hashes[:6])])
    # The window before 32 needs blocks 6 and 7 only; both are there.
    assert index.match(41, hashes)[A].usable_tokens == 32
    index.apply(A, 4, None, [BlocksRemoved(1, hashes[6:7])])
    assert index.match(41, hashes)[A].usable_tokens == 0


def test_the_last_token_is_always_left_to_compute() -> None:
    index = PrefixIndex([group("full_attention")], 4)
    index.add(A, 100)
    hashes = tuple(chain(8))
    index.apply(A, 0, None, [BlocksStored(0, hashes, None, 0, 4)])
    assert index.match(8, hashes)[A].usable_tokens == 4
    assert index.match(9, hashes)[A].usable_tokens == 8


def test_gaps_repeats_and_snapshots() -> None:
    index = PrefixIndex([group("full_attention")], 4)
    index.add(A, 100)
    hashes = tuple(chain(16))
    events = [BlocksStored(0, (value,), None, 0, 4) for value in hashes]
    assert index.apply(A, 0, None, events[:2])
    assert not index.apply(A, 3, None, events[3:])
    assert (index.next_sequence(A), index.num_entries(A)) == (2, 2)
    assert index.apply(A, 1, None, events[1:3])  # the first was seen already
    assert (index.next_sequence(A), index.num_entries(A)) == (3, 3)
    assert index.apply(A, 50, WHOLE, [events[0]])
    assert (index.next_sequence(A), index.num_entries(A)) == (50, 1)
    assert index.apply(A, 50, None, [AllCleared()])
    assert index.num_entries(A) == 0


def test_a_worker_cannot_fill_the_index_beyond_its_pool() -> None:
    index = PrefixIndex([group("full_attention")], 4)
    index.add(A, 3)
    index.apply(A, 0, None, [BlocksStored(0, tuple(chain(40)), None, 0, 4)])
    assert index.num_entries(A) == 3


def test_events_of_unknown_groups_and_blocks_are_harmless() -> None:
    index = PrefixIndex([group("full_attention")], 4)
    index.add(A, 3)
    odd: list[KVEvent] = [
        BlocksStored(7, (b"x",), None, 0, 4),
        BlocksRemoved(0, (b"never stored",)),
    ]
    assert index.apply(A, 0, None, odd)
    assert index.num_entries(A) == 0


def test_a_removed_worker_takes_its_blocks_along() -> None:
    index = PrefixIndex([group("full_attention")], 4)
    index.add(A, 100)
    index.add(B, 100)
    hashes = tuple(chain(16))
    for worker in (A, B):
        index.apply(worker, 0, None, [BlocksStored(0, hashes, None, 0, 4)])
    index.remove(A)
    assert list(index.match(17, hashes)) == [B]
    index.remove(B)
    assert index.num_blocks == 0


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (group("cross_attention"), "groups.kind"),
        (group("full_attention", 6), "groups.block_tokens"),
        (group("sliding_window", 4, 0), "groups.window_tokens"),
    ],
)
def test_what_cannot_be_matched_exactly_is_refused_by_name(bad: GroupInfo, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PrefixIndex([bad], 4)
    assert caught.value.param == param


LAYOUTS: dict[str, list[Spec]] = {
    "full": [FullAttentionSpec(4, 1, 8, 4)],
    "full and window": [
        FullAttentionSpec(4, 1, 8, 4),
        SlidingWindowSpec(4, 1, 8, 4, 10),
    ],
    "two sizes": [FullAttentionSpec(8, 1, 4, 4), SlidingWindowSpec(4, 1, 8, 4, 13)],
    "window only": [SlidingWindowSpec(4, 1, 8, 4, 7)],
    "chunks": [FullAttentionSpec(4, 1, 8, 4), ChunkedLocalSpec(4, 1, 8, 4, 16)],
    "state": [FullAttentionSpec(4, 1, 8, 4), LinearStateSpec(4, 256)],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_promises_exactly_what_the_workers_coordinator_finds(name: str) -> None:
    num_hits = sum(follow_a_coordinator(LAYOUTS[name], seed) for seed in range(6))
    assert num_hits > 20


def follow_a_coordinator(specs: list[Spec], seed: int) -> int:
    """Random prompts with common beginnings in a small pool; its events feed the index."""
    rng = random.Random(seed)
    groups = tuple(KVCacheGroup(i, spec, (i,)) for i, spec in enumerate(specs))
    layout = KVCacheLayout(groups, 256, 4)
    pool = KVCacheCoordinator(layout, 40, max_model_tokens=64, max_step_tokens=8)
    infos = [GroupInfo(s.kind, s.block_tokens, s.window_tokens, 1, s.page_bytes) for s in specs]
    index = PrefixIndex(infos, 4)
    index.add(A, 40)
    hasher = BlockHasher(b"k", 4)
    num_hits = 0
    for number in range(40):
        tokens = [rng.randint(0, 1)] * 24 + [rng.randint(0, 1)] * 20 + [7] * 16
        tokens = tokens[: rng.randint(1, 60)]
        request = KVSequence(("r", number), tokens)
        hasher.extend(request.hashes, tokens)
        hit = pool.find_longest_cache_hit(request, len(tokens) - 1)
        found = index.match(len(tokens), request.hashes)[A]
        assert found.usable_tokens == hit.num_tokens, f"seed {seed} request {number}"
        num_hits += hit.num_tokens > 0
        compute(pool, request, hit)
        batch = pool.events.since(index.next_sequence(A))
        assert batch is not None
        assert index.apply(A, batch.first_seq, None, batch.events)
    return num_hits


def compute(pool: KVCacheCoordinator, request: KVSequence, found: CacheHit) -> None:
    """Prefill in steps of 8 tokens; what falls out of windows or is freed may be evicted later."""
    hit: CacheHit | None = found
    computed = found.num_tokens
    while computed < request.num_tokens:
        step = min(8, request.num_tokens - computed)
        assert pool.allocate(request, num_new_tokens=step, hit=hit), "the pool is too small"
        hit = None
        computed += step
        pool.publish(request.key, computed)
        pool.release_out_of_window(request.key, computed)
    pool.free(request.key)


def test_a_snapshot_may_come_in_parts_and_counts_once_it_is_whole() -> None:
    index, hashes = PrefixIndex([group("full_attention")], 4), chain(64)
    index.add(A, 100)
    old, parts = BlocksStored(0, (b"o" * 32,), None, 0, 4), [hashes[:5], hashes[5:11], hashes[11:]]
    told = [BlocksStored(0, tuple(one), None, 0, 4) for one in parts]
    assert index.apply(A, 0, None, [old])
    for number, one in enumerate(told):
        assert index.next_sequence(A) == 1, "until the last one the whole is wanted again"
        assert index.apply(A, 50, SnapshotPart(number, 3), [one])
    assert (index.next_sequence(A), index.num_entries(A)) == (50, 16), "what was before has gone"
    assert index.match(65, hashes)[A].usable_tokens == 64


def test_a_part_that_does_not_follow_the_last_one_is_refused() -> None:
    index = PrefixIndex([group("full_attention")], 4)
    index.add(A, 100)
    told = [BlocksStored(0, (bytes([i]) * 32,), None, 0, 4) for i in range(4)]
    assert index.apply(A, 9, SnapshotPart(0, 4), told[:1])
    assert not index.apply(A, 9, SnapshotPart(2, 4), told[2:3])
    assert (index.next_sequence(A), index.num_entries(A)) == (0, 1)
    assert index.apply(A, 9, SnapshotPart(0, 2), told[1:2]), "another one from its beginning"
    assert index.apply(A, 9, SnapshotPart(1, 2), told[2:3])
    assert not index.apply(A, 9, SnapshotPart(3, 4), told[3:])
    assert (index.next_sequence(A), index.num_entries(A)) == (9, 2)
