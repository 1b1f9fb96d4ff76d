"""Window blocks that no aligned boundary can reach are not cached: they would displace others."""

import random

import pytest

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.manager import GroupManager
from disagg.kv.kinds.sliding_window import SlidingWindowManager, SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheLayout

SMALL = 16
LARGE = 64
CHUNK = 128
PRESSED, ROOMY = 100, 100_000


def specs(window_tokens: int = 40) -> list[Spec]:
    """A full group in blocks of 64 tokens and a window group in blocks of 16."""
    return [FullAttentionSpec(LARGE, 1, 8, 2), SlidingWindowSpec(SMALL, 1, 32, 2, window_tokens)]


def coordinator(
    num_blocks: int, window_tokens: int = 40, eagle_groups: tuple[int, ...] = ()
) -> KVCacheCoordinator:
    return KVCacheCoordinator(
        KVCacheLayout.one_layer_per_group(specs(window_tokens)),
        num_blocks,
        max_model_tokens=4096,
        max_step_tokens=CHUNK,
        eagle_groups=eagle_groups,
    )


def sequence(key: object, tokens: list[int]) -> KVSequence:
    made = KVSequence(key, tokens)
    BlockHasher(b"test", SMALL).extend(made.hashes, made.token_ids)
    return made


def serve(kv: KVCacheCoordinator, made: KVSequence) -> int:
    """Compute a prompt from its hit on and end it; returns the hit's length."""
    hit = kv.find_longest_cache_hit(made, made.num_tokens - 1)
    assert kv.admit(made.key, made.num_tokens, hit)
    done = hit.num_tokens
    while done < made.num_tokens:
        new = min(CHUNK, made.num_tokens - done)
        assert kv.allocate(made, num_new_tokens=new)
        done += new
        kv.publish(made.key, done)
        kv.release_out_of_window(made.key, done)
    kv.free(made.key)
    return hit.num_tokens


def hit_tokens(num_blocks: int, seed: int) -> int:
    """Hits of prompts that share a few beginnings, chosen unevenly."""
    rng = random.Random(seed)
    shared = [[rng.randrange(1 << 30) for _ in range(rng.randint(3, 9) * 64)] for _ in range(12)]
    weights = [1 / (1 + rank) for rank in range(len(shared))]
    kv = coordinator(num_blocks)
    total = 0
    for number in range(300):
        (start,) = rng.choices(shared, weights)
        tokens = start + [rng.randrange(1 << 30) for _ in range(rng.randint(20, 200))]
        total += serve(kv, sequence(number, tokens))
    kv.check()
    return total


def everything_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlidingWindowManager, "_publish_run", GroupManager._publish_run)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_more_hits_under_pressure_and_the_same_without(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressed, roomy = hit_tokens(PRESSED, seed), hit_tokens(ROOMY, seed)
    everything_is_published(monkeypatch)
    assert pressed > 1.02 * hit_tokens(PRESSED, seed)
    assert roomy == hit_tokens(ROOMY, seed)


def cached_indexes(kv: KVCacheCoordinator, num_tokens: int) -> list[int]:
    """Indexes of the window group's blocks that can be found after so many tokens."""
    made = sequence("r", list(range(num_tokens)))
    serve(kv, made)
    index = kv.pool.cache.index(1)
    return [i for i, value in enumerate(kv.managers[1].chain(made.hashes)) if value in index]


@pytest.mark.parametrize(
    ("window_tokens", "eagle", "expected"),
    [
        (40, (), [1, 2, 3, 5, 6, 7]),  # three blocks before 64 and 128
        (17, (), [3, 7]),
        (1, (), []),
        (50, (), list(range(8))),  # four: everything
        (17, (0, 1), [3, 4, 7]),  # the block after a boundary proves it
    ],
)
def test_what_is_cached(window_tokens: int, eagle: tuple[int, ...], expected: list[int]) -> None:
    assert cached_indexes(coordinator(ROOMY, window_tokens, eagle), 150) == expected


def test_a_pulled_window_is_published_alike() -> None:
    kv = coordinator(ROOMY)
    made = sequence("r", list(range(128)))
    assert kv.reserve_external(made, 128) is not None
    kv.commit_external("r")
    kv.free("r")
    hit = kv.find_longest_cache_hit(sequence("s", list(range(200))), 199)
    assert hit.num_tokens == 128
    assert [block != NULL_BLOCK for block in hit.block_ids[1]] == [False] * 5 + [True] * 3


@pytest.mark.parametrize("eagle", [(), (0, 1)])
@pytest.mark.parametrize("window_tokens", [1, 2, 16, 17, 18, 33, 40, 49, 50, 80])
def test_no_hit_is_lost_at_any_length(
    window_tokens: int, eagle: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> list[int]:
        kv = coordinator(ROOMY, window_tokens, eagle)
        serve(kv, sequence("r", list(range(400))))
        asked = [sequence(n, list(range(n))) for n in range(1, 420)]
        return [kv.find_longest_cache_hit(one, one.num_tokens - 1).num_tokens for one in asked]

    ours = found()
    everything_is_published(monkeypatch)
    assert ours == found()
    assert max(ours) >= 320


def test_control_a_boundary_that_lost_a_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SlidingWindowManager.__init__

    def one_short(self: SlidingWindowManager, *args: object) -> None:
        right(self, *args)  # type: ignore[arg-type]
        publish = self._publish_run

        def narrower(*run: object) -> None:
            self.num_window_blocks -= 1
            publish(*run)  # type: ignore[arg-type]
            self.num_window_blocks += 1

        self._publish_run = narrower  # type: ignore[assignment]

    monkeypatch.setattr(SlidingWindowManager, "__init__", one_short)
    with pytest.raises(AssertionError):
        test_no_hit_is_lost_at_any_length(40, (), monkeypatch)
