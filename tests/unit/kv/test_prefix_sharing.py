"""Both sides of a prefix pull agree on a boundary, over every kind of group and random caches."""

import random

import pytest

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.prefix_sharing import PrefixSharing, SharedPrefix, WantedPrefix
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import plan_layout

BLOCK = 4
FULL = FullAttentionSpec(BLOCK, 1, 8, 4)
WINDOW = SlidingWindowSpec(BLOCK, 1, 8, 4, 10)
CHUNK = ChunkedLocalSpec(BLOCK, 1, 8, 4, 16)
STATE = LinearStateSpec(BLOCK, 600)
LAYOUTS: dict[str, list[Spec]] = {
    "full": [FULL],
    "hybrid": [WINDOW, FULL],
    "windows": [WINDOW, SlidingWindowSpec(BLOCK, 1, 8, 4, 6)],
    "chunks": [CHUNK, FULL],
    "states": [STATE, FULL],
    "sizes": [FullAttentionSpec(2 * BLOCK, 1, 8, 4), WINDOW],
}
LENGTH = 47
NUM_BLOCKS = 200


class Worker:
    """A coordinator, and what it may have computed of one prompt."""

    def __init__(self, layout: str) -> None:
        plan = plan_layout(LAYOUTS[layout])
        self.hasher = BlockHasher(b"test", plan.hash_block_tokens)
        self.kv = KVCacheCoordinator(plan, NUM_BLOCKS, max_model_tokens=96, max_step_tokens=8)
        self.pulls = PrefixSharing(self.kv)
        self.num_requests = 0

    def request(self, num_tokens: int) -> KVSequence:
        self.num_requests += 1
        request = KVSequence(f"r{self.num_requests}", list(range(num_tokens)))
        self.hasher.extend(request.hashes, request.token_ids)
        return request

    def compute(self, num_tokens: int) -> None:
        """Serve so much of the prompt, a block per step; it stays cached."""
        request = self.request(num_tokens)
        for start in range(0, num_tokens, BLOCK):
            end = min(start + BLOCK, num_tokens)
            assert self.kv.allocate(request, num_new_tokens=end - start)
            self.kv.publish(request.key, end)
        self.kv.free(request.key)

    def forget(self, rng: random.Random, share: float) -> None:
        """Let some cached blocks be evicted, any of them."""
        for group in range(len(self.kv.layout.groups)):
            for block in list(self.kv.pool.cache.index(group).values()):
                if rng.random() < share:
                    self.kv.pool.touch([block])
                    self.kv.pool.forget([block])
                    self.kv.pool.release([block])

    def has(self, request: KVSequence, group: int, position: int) -> bool:
        """Whether the block at a table position is cached."""
        manager = self.kv.managers[group]
        per_state = manager.blocks_per_state
        value = manager.chain(request.hashes)[position // per_state]
        return value in self.kv.pool.cache.index(group)


def ask(reader: Worker, num_tokens: int, own: int = 0) -> tuple[KVSequence, WantedPrefix]:
    """Reserve for a boundary and say what is wanted."""
    request = reader.request(LENGTH)
    reservation = reader.pulls.reserve(request, num_tokens, LENGTH)
    assert reservation is not None
    return request, reader.pulls.wanted(request, reservation, own)


def lacks(reader: Worker, num_tokens: int) -> list[list[int]]:
    """Per group the positions that a pull to a boundary must bring."""
    request = reader.request(LENGTH)
    reservation = reader.pulls.reserve(request, num_tokens, LENGTH)
    assert reservation is not None
    reader.kv.free(request.key)
    return [[position for position, _ in pairs] for pairs in reservation.lacks]


def covers(owner: Worker, positions: list[list[int]]) -> bool:
    request = owner.request(LENGTH)
    return all(owner.has(request, g, p) for g, some in enumerate(positions) for p in some)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_answer_is_the_longest_boundary_that_both_have(layout: str) -> None:
    lengths = set[int]()
    for seed in range(60):
        rng = random.Random(f"{layout}/{seed}")
        owner, reader = Worker(layout), Worker(layout)
        owner.compute(rng.randrange(LENGTH))
        owner.forget(rng, rng.choice((0, 0.1, 0.3)))
        if rng.random() < 0.6:
            reader.compute(rng.randrange(LENGTH))
            reader.forget(rng, rng.choice((0, 0.3)))
        step = reader.kv.managers[0].alignment_tokens
        asked = reader.pulls.boundary(rng.randrange(step, LENGTH))
        own = reader.kv.find_longest_cache_hit(reader.request(LENGTH), asked - step).num_tokens
        request, wanted = ask(reader, asked, own)
        reader.kv.free(request.key)
        shared = owner.pulls.match(wanted)
        boundaries = [
            end
            for end in range(own + step, asked + 1, step)
            if covers(owner, lacks(reader, end)) and any(lacks(reader, end))
        ]
        expected = max(boundaries, default=0)
        found = shared.num_tokens if shared else 0
        assert max(found, own) == max(expected, own), f"seed {seed}: {found}, not {expected}"
        if shared is not None and found > own:
            lengths.add(found)
            assert [[p for p, _ in pairs] for pairs in shared.blocks] == lacks(reader, found), seed
        owner.kv.check()
        reader.kv.check()
    assert len(lengths) > 2, "the random caches must differ"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matching_has_no_effects_and_reserving_gives_all_back(layout: str) -> None:
    owner, reader = Worker(layout), Worker(layout)
    owner.compute(LENGTH)
    free = reader.kv.num_free_blocks
    request, wanted = ask(reader, 40)
    before = owner.kv.num_free_blocks
    assert owner.pulls.match(wanted) is not None
    assert owner.kv.num_free_blocks == before
    assert reader.kv.find_longest_cache_hit(reader.request(LENGTH), 40).num_tokens == 0
    reader.kv.commit_external(request.key)
    assert reader.kv.find_longest_cache_hit(reader.request(LENGTH), 40).num_tokens == 40
    while (done := reader.kv.num_scheduled_tokens(request.key)) < LENGTH:
        assert reader.kv.allocate(request, num_new_tokens=min(8, LENGTH - done)), "it was promised"
    reader.kv.free(request.key)
    assert reader.kv.num_free_blocks == free
    reader.kv.check()


def test_the_rest_of_the_prompt_is_promised() -> None:
    reader = Worker("hybrid")
    request, _ = ask(reader, 40)
    assert reader.kv.num_free_blocks > reader.kv.num_available_blocks
    reader.kv.free(request.key)
    assert reader.kv.num_free_blocks == reader.kv.num_available_blocks


@pytest.mark.parametrize("layout", ["full", "hybrid", "sizes", "chunks", "states"])
def test_what_arrived_is_found_and_what_did_not_is_not(layout: str) -> None:
    for seed in range(20):
        rng = random.Random(f"{layout}/{seed}")
        reader = Worker(layout)
        request = reader.request(LENGTH)
        reservation = reader.pulls.reserve(request, 40, LENGTH)
        assert reservation is not None
        pulled = [(g, p) for g, pairs in enumerate(reservation.lacks) for p, _ in pairs]
        failed = set(rng.sample(pulled, rng.randint(1, len(pulled) - 1)))
        reader.pulls.publish_intact(request, 40, failed)
        for group, position in pulled:
            cached = reader.has(request, group, position)
            if (group, position) in failed:
                assert not cached, f"seed {seed}: {group}:{position} did not arrive"
            elif reader.kv.managers[group].blocks_per_state == 1:
                assert cached, f"seed {seed}: {group}:{position} did arrive"
        reader.kv.free(request.key)
        reader.kv.check()
        assert reader.kv.num_free_blocks == reader.kv.num_usable_blocks


@pytest.mark.parametrize(
    "wanted",
    [
        WantedPrefix(40, 0, (b"x" * 32,) * 10, (0,)),
        WantedPrefix(40, 1 << 31, (b"x" * 32,) * 10, (0, 0)),
        WantedPrefix(1 << 31, 0, (b"x" * 32,) * 10, (0, 1 << 31)),
        WantedPrefix(40, 0, (b"x" * 32,) * 10, (0, 0)),
        WantedPrefix(40, 8, (b"x" * 32,) * 2, (0, 9)),
    ],
    ids=["groups", "far", "long", "unknown", "middle"],
)
def test_a_question_that_fits_nothing_gets_none(wanted: WantedPrefix) -> None:
    owner = Worker("hybrid")
    owner.compute(LENGTH)
    found: SharedPrefix | None = owner.pulls.match(wanted)
    assert found is None
