"""A linear state of several blocks: allocated, found, pulled, evicted as one."""

import os
import random
from collections.abc import Mapping

import pytest

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.blocks.cache_policy import CachePolicy
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.linear_state import LinearStateManager, LinearStateSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.messages.kv_events import BlocksStored

SIZE = 4
FULL = FullAttentionSpec(SIZE, 1, 4, 2)  # a page of 64 bytes
STATE, FULL_GROUP = 1, 0
HASHER = BlockHasher(b"states", SIZE)


def coordinator(
    num_blocks: int, blocks_per_state: int = 3, deduplicate: bool = True
) -> KVCacheCoordinator:
    state = LinearStateSpec(SIZE, 64 * blocks_per_state - 10)
    groups = (KVCacheGroup(0, FULL, (0,)), KVCacheGroup(1, state, (1,), blocks_per_state))
    return KVCacheCoordinator(
        KVCacheLayout(groups, 64, SIZE),
        num_blocks,
        max_model_tokens=1_000,
        max_step_tokens=64,
        policy=CachePolicy(deduplicate=deduplicate),
    )


def request(key: str, tokens: list[int]) -> KVSequence:
    made = KVSequence(key, tokens)
    HASHER.extend(made.hashes, tokens)
    return made


def run(kv: KVCacheCoordinator, made: KVSequence, num_tokens: int) -> None:
    assert kv.allocate(made, num_new_tokens=num_tokens)
    done = kv.num_scheduled_tokens(made.key)
    kv.publish(made.key, done)
    kv.release_out_of_window(made.key, done)
    kv.check()


def test_a_step_takes_a_whole_state() -> None:
    kv = coordinator(40)
    first = request("a", list(range(20)))
    run(kv, first, 8)
    assert kv.tables.num_held("a") == (2, 3)
    table = kv.tables.blocks("a")[STATE]
    assert table[:3] == [NULL_BLOCK] * 3  # the state at 4 was never computed
    assert NULL_BLOCK not in table[3:]
    assert kv.tables.in_window_blocks("a", 8)[STATE] == list(enumerate(table[3:], 3))
    assert kv.admission.num_needed("a", 9, None, 8, False) == 1 + 3
    assert kv.allocate(first, num_new_tokens=4)
    assert kv.tables.num_held("a") == (3, 6)  # the state it starts from is still there
    kv.free("a")
    kv.check()
    assert kv.num_free_blocks == kv.num_usable_blocks


def test_blocks_of_a_state_are_counted_together() -> None:
    kv, made = coordinator(40), request("a", list(range(20)))
    run(kv, made, 8)
    assert kv.tables.count_blocks(kv.pool.cache) == ((2, 0), (3, 0))
    run(kv, made, 4)
    assert kv.tables.count_blocks(kv.pool.cache) == ((3, 0), (3, 3))
    kv.free("a")
    assert kv.tables.count_blocks(kv.pool.cache) == ((0, 3), (0, 6))


def test_a_state_that_does_not_fit_takes_nothing() -> None:
    kv = coordinator(1 + 1 + 2)  # a token block, two thirds of a state
    assert not kv.allocate(request("a", [1, 2, 3]), num_new_tokens=3)
    assert kv.num_free_blocks == 3
    assert not kv.admit("a", 3)
    assert coordinator(1 + 1 + 3).allocate(request("a", [1, 2, 3]), num_new_tokens=3)


def test_a_published_state_is_found_and_announced_once() -> None:
    kv = coordinator(40)
    run(kv, request("a", list(range(20))), 8)
    state = kv.tables.blocks("a")[STATE][3:]
    kv.free("a")
    again = request("b", list(range(20)))
    hit = kv.find_longest_cache_hit(again, 19)
    assert hit.num_tokens == 8
    assert hit.block_ids[STATE] == [NULL_BLOCK] * 3 + state
    assert kv.group_hit_tokens(again) == (8, 8)
    batch = kv.events.since(0)
    assert batch is not None
    stored = [e for e in batch.events if isinstance(e, BlocksStored)]
    assert [(e.group, e.first_position, e.hashes) for e in stored] == [
        (FULL_GROUP, 0, tuple(again.hashes[:2])),
        (STATE, 4, (again.hashes[1],)),  # exactly the tokens 4..8, in one event
    ]
    assert kv.events.snapshot().hashes == (tuple(again.hashes[:2]), (again.hashes[1],))
    assert kv.allocate(again, num_new_tokens=4, hit=hit)
    assert kv.tables.blocks("b")[STATE][3:6] == state
    kv.check()


def test_the_first_evicted_block_ends_the_state() -> None:
    kv = coordinator(1 + 2 + 3 + 3)
    run(kv, request("a", list(range(8))), 8)
    kv.free("a")
    again = request("b", list(range(9)))
    assert kv.find_longest_cache_hit(again, 8).num_tokens == 8
    taken = kv.pool.allocate(3 + 2)  # those never used, and the tokens' blocks
    assert kv.group_hit_tokens(again) == (0, 8)
    taken += kv.pool.allocate(1)
    assert kv.group_hit_tokens(again) == (0, 0)
    assert kv.find_longest_cache_hit(again, 8).num_tokens == 0
    batch = kv.events.since(0)
    assert batch is not None
    assert [type(event).__name__ for event in batch.events][-1] == "BlocksRemoved"
    kv.pool.release(taken)
    kv.check()


@pytest.mark.parametrize("deduplicate", [True, False])
def test_states_computed_twice_are_not_mixed(deduplicate: bool) -> None:
    kv = coordinator(60, deduplicate=deduplicate)
    first, second = (request(key, list(range(9))) for key in "ab")
    for made in (first, second):
        assert kv.allocate(made, num_new_tokens=8)
    states = [kv.tables.blocks(key)[STATE][3:] for key in "ab"]
    for key in "ab":
        kv.publish(key, 8)
    third = request("c", list(range(9)))
    assert kv.find_longest_cache_hit(third, 8).block_ids[STATE][3:] == states[0]
    kv.free("a")
    kv.free("b")
    kv.check()
    # The older state leaves; with both cached the other one, whole, takes its place.
    while kv.pool.cache.index(STATE).get(third.hashes[1]) == states[0][0]:
        kv.pool.allocate(1)
    found = kv.find_longest_cache_hit(third, 8).block_ids[STATE][3:]
    assert found == ([] if deduplicate else states[1])


def test_a_state_is_pulled_block_by_block() -> None:
    owner, reader = coordinator(60), coordinator(60)
    prompt = list(range(10))
    run(owner, request("a", prompt), 10)
    offered = owner.tables.in_window_blocks("a", 10)[STATE]
    made = request("b", [*prompt, 99])
    reserved = reader.reserve_external(made, 10)
    assert reserved is not None
    assert [place for place, _ in reserved.lacks[STATE]] == [place for place, _ in offered]
    assert [place for place, _ in offered] == [6, 7, 8]
    assert reserved.hit_tokens == (0, 0)
    reader.commit_external("b")
    assert reader.tables.num_held("b") == (3, 3)  # the next token's state is in the same range
    reader.check()
    at_boundary = reader.reserve_external(request("c", list(range(50, 59))), 8)
    assert at_boundary is not None
    assert reader.tables.num_held("c") == (3, 6)
    reader.commit_external("c")
    assert reader.find_longest_cache_hit(request("d", list(range(50, 59))), 8).num_tokens == 8


class Memory:
    """What the device holds: per block which state wrote it, and which part of it."""

    def __init__(self, kv: KVCacheCoordinator) -> None:
        self.kv = kv
        self.content: dict[int, tuple[bytes, int, int]] = {}
        self.count = 0

    def write(self, key: str, value: bytes) -> None:
        self.count += 1
        size = self.kv.managers[STATE].blocks_per_state
        for part, block in enumerate(self.kv.tables.blocks(key)[STATE][-size:]):
            assert block != NULL_BLOCK
            self.content[block] = (value, self.count, part)

    def check_hit(self, value: bytes, blocks: list[int]) -> None:
        found = [self.content[block] for block in blocks]
        assert {name for name, _, _ in found} == {value}, "the state of another prefix"
        assert len({count for _, count, _ in found}) == 1, "parts of two states"
        assert [part for _, _, part in found] == list(range(len(blocks)))


def random_lives(seed: int, steps: int, deduplicate: bool) -> int:
    """Short requests over few prefixes in a small pool, published late; the number of hits."""
    rng = random.Random(seed)
    kv = coordinator(26, deduplicate=deduplicate)
    memory = Memory(kv)
    running: dict[str, int] = {}
    done: list[str] = []
    hits = 0
    for step in range(steps):
        kind = rng.random()
        if kind < 0.4 and len(running) < 3:
            made = request(str(step), [rng.randrange(2), 0, 0, 0, rng.randrange(2), 0, 0, 0, step])
            hit = kv.find_longest_cache_hit(made, 8)
            if hit.num_tokens:
                hits += 1
                memory.check_hit(made.hashes[hit.num_tokens // SIZE - 1], hit.block_ids[STATE][-3:])
            end = rng.choice([4, 8])
            new = end - hit.num_tokens
            if new > 0 and kv.allocate(made, num_new_tokens=new, hit=hit):
                memory.write(str(step), made.hashes[end // SIZE - 1])
                running[str(step)] = end
        elif kind < 0.7 and running:
            key = rng.choice(list(running))
            kv.publish(key, running[key])
            kv.release_out_of_window(key, running.pop(key))
            done.append(key)
        elif done:
            kv.free(done.pop(rng.randrange(len(done))))
        kv.check()
    return hits


@pytest.mark.parametrize("deduplicate", [True, False])
def test_random_lives_never_mix_states(deduplicate: bool) -> None:
    seed = int(os.environ.get("DISAGG_TEST_SEED", "1"))
    print(f"DISAGG_TEST_SEED={seed}")
    assert random_lives(seed, 1_500, deduplicate) > 50


def takes_any_part(self: LinearStateManager, index: Mapping[bytes, int], value: bytes) -> list[int]:
    """Parts are found by the chain value alone, whichever state they were written with."""
    if value not in index:
        return []
    found = [index[value]]
    for part in range(1, self.blocks_per_state):
        for key, block in self.pool.cache.index(self.pool.num_groups - 1).items():
            if key.startswith(value) and key.endswith(bytes([part])):
                found.append(block)
                break
    return found if len(found) == self.blocks_per_state else []


def test_mixing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearStateManager, "_find", takes_any_part)

    def try_seeds() -> None:
        for seed in range(20):
            random_lives(seed, 1_500, False)

    with pytest.raises(AssertionError, match="parts of two states"):
        try_seeds()


def test_more_blocks_per_state_change_no_hit() -> None:
    """The same lives with one and with three blocks per state, in pools with room for all."""
    seed = int(os.environ.get("DISAGG_TEST_SEED", "1"))
    print(f"DISAGG_TEST_SEED={seed}")
    rng = random.Random(seed)
    one, three = coordinator(20_000, 1), coordinator(20_000, 3)
    for step in range(400):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
        # No more than two states in a row: of those all are kept.
        ends = sorted(rng.sample(range(1, len(tokens) + 1), min(2, len(tokens))))
        seen = []
        for kv in (one, three):
            made = request(str(step), list(tokens))
            hit = kv.find_longest_cache_hit(made, len(tokens) - 1)
            needed, first = [], True
            for end in ends:
                done = hit.num_tokens if first else kv.num_scheduled_tokens(made.key)
                if end <= done:
                    continue
                assert kv.allocate(made, num_new_tokens=end - done, hit=hit if first else None)
                first = False
                needed.append(kv.tables.num_held(made.key))
                kv.publish(made.key, end)
                kv.release_out_of_window(made.key, end)
            kv.free(made.key)
            seen.append((hit.num_tokens, kv.group_hit_tokens(made), needed))
        (hit_one, groups_one, held_one), (hit_three, groups_three, held_three) = seen
        assert (hit_one, groups_one) == (hit_three, groups_three)
        assert [(full, 3 * state) for full, state in held_one] == held_three
    one.check()
    three.check()


def kept_states(kv: KVCacheCoordinator) -> list[int]:
    """Hit lengths up to 60 tokens at which a state is found."""
    found = [request(str(n), list(range(n))) for n in range(SIZE, 61, SIZE)]
    return [one.num_tokens for one in found if kv.group_hit_tokens(one)[STATE] == one.num_tokens]


@pytest.mark.parametrize("blocks_per_state", [1, 3])
def test_decoding_keeps_one_state_in_as_many_blocks(blocks_per_state: int) -> None:
    kv = coordinator(400, blocks_per_state)
    made = request("a", list(range(20)))
    for num_tokens in (9, 11, *(1,) * 40):  # a prompt of 20 tokens, then decoding
        run(kv, made, num_tokens)
        if num_tokens != 9:
            made.token_ids.append(made.num_tokens)
            HASHER.extend(made.hashes, made.token_ids)
    kv.free("a")
    # The prompt's, the next one, and then every third; or each of those a step ended at.
    thinned = [20, 24, 36, 48, 60]
    assert kept_states(kv) == (thinned if blocks_per_state == 3 else list(range(20, 61, 4)))


@pytest.mark.parametrize(
    ("num_tokens", "last"), [(53, [48, 52]), (55, [48, 52]), (56, [48, 52, 56])]
)
def test_a_prompts_last_states_are_kept_however_small_its_chunks(
    num_tokens: int, last: list[int]
) -> None:
    kv = coordinator(400, 3)
    made = request("a", list(range(num_tokens)))
    for start in range(0, num_tokens, SIZE):
        run(kv, made, min(SIZE, num_tokens - start))
    kv.free("a")
    assert kept_states(kv) == [4, 8, 12, 24, 36, *last]


def test_random_lives_leak_nothing() -> None:
    """Admission, pulls, steps in flight, leases and aborts in a pool that is often full."""
    seed = int(os.environ.get("DISAGG_TEST_SEED", "1"))
    print(f"DISAGG_TEST_SEED={seed}")
    rng = random.Random(seed)
    kv = coordinator(60)
    live: dict[str, KVSequence] = {}
    pulls: list[str] = []
    steps: list[tuple[int, str, int]] = []
    leases: list[int] = []
    refused = pulled = 0
    for step in range(3_000):
        kind = rng.choice(["admit", "pull", "pulled", "step", "step", "end", "lease", "free"])
        key = rng.choice([*live, ""])
        made = request(str(step), [rng.randrange(2) for _ in range(rng.randrange(2, 40))])
        if kind == "admit" and len(live) < 5:
            hit = kv.find_longest_cache_hit(made, made.num_tokens - 1)
            if not kv.admit(made.key, made.num_tokens, hit):
                refused += 1
                continue
            assert kv.allocate(made, num_new_tokens=1)
            live[str(step)] = made
            kv.hold_step(step, [made.key])
            steps.append((step, str(step), kv.num_scheduled_tokens(made.key)))
        elif kind == "pull" and len(live) < 5:
            reserved = kv.reserve_external(made, made.num_tokens - 1)
            if reserved is None:
                refused += 1
                continue
            assert len(reserved.lacks[STATE]) == 3
            kv.pool.hold(("pull", str(step)), [b for group in reserved.lacks for _, b in group])
            live[str(step)] = made
            pulls.append(str(step))
        elif kind == "pulled" and pulls:
            done = pulls.pop(rng.randrange(len(pulls)))
            if done in live:
                kv.commit_external(done)
                pulled += 1
            kv.pool.drop(("pull", done))
        elif kind == "step" and key and key not in pulls and key not in {k for _, k, _ in steps}:
            left = live[key].num_tokens - kv.num_scheduled_tokens(key)
            if left and kv.allocate(live[key], num_new_tokens=min(left, rng.randrange(1, 9))):
                kv.hold_step(step, [key])
                steps.append((step, key, kv.num_scheduled_tokens(key)))
        elif kind == "end" and steps:
            number, name, end = steps.pop(0)
            kv.release_step(number)
            if name in live:
                kv.publish(name, end)
                kv.release_out_of_window(name, end)
        elif kind == "lease" and key and key not in pulls:
            if leases and rng.random() < 0.6:
                kv.pool.drop(leases.pop(0))
            (_, state) = kv.tables.in_window_blocks(key, kv.num_scheduled_tokens(key))
            assert len(state) == 3
            kv.pool.hold(step, [block for _, block in state])
            leases.append(step)
        elif kind == "free" and key:
            kv.free(key)
            del live[key]
        kv.check()
    assert refused > 3  # the seed is random: only that both happen
    assert pulled > 3
    for key in live:
        kv.free(key)
    for holder in [*leases, *(("pull", key) for key in pulls)]:
        kv.pool.drop(holder)
    for number, _, _ in steps:
        kv.release_step(number)
    kv.check()
    assert kv.num_free_blocks == kv.num_usable_blocks
