"""The prefix that pool and tiers have together, against looking at every boundary."""

import random

import pytest

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.tiered_prefix import TieredMatcher
from tests.unit.kv.test_prefix_sharing import LAYOUTS, LENGTH, Worker
from tests.unit.scheduling.failure_worlds import needed

TIER_SHARES = (0.0, 0.5, 0.9, 1.0)


def in_pool(worker: Worker, group: int) -> set[int]:
    """Indexes of the chain values of a prompt that are cached in a group."""
    manager, request = worker.kv.managers[group], worker.request(LENGTH)
    chain = manager.chain(request.hashes)
    return {place for place, value in enumerate(chain) if manager.cached_blocks(value)}


def has_all(needs: list[int], pool: set[int], tier: set[int]) -> bool:
    """Whether the first of these blocks are in the pool and the others in the tier."""
    return any(
        pool.issuperset(needs[:split]) and tier.issuperset(needs[split:])
        for split in range(len(needs) + 1)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_longest_boundary_at_which_all_groups_have_what_is_seen(layout: str) -> None:
    found_lengths = set[int]()
    for seed in range(150):
        rng = random.Random(f"{layout}/{seed}")
        worker = Worker(layout)
        worker.compute(rng.randrange(LENGTH))
        worker.forget(rng, rng.choice((0, 0.1, 0.5)))
        managers = worker.kv.managers
        request = worker.request(LENGTH)
        share, stored = rng.choice(TIER_SHARES), set[tuple[int, bytes]]()
        tiers = [set[int]() for _ in managers]
        for manager in managers:
            for place, value in enumerate(manager.chain(request.hashes)):
                if rng.random() < share:
                    tiers[manager.group].add(place)
                    stored.update((manager.group, one) for one in manager.stored_values(value))
        most = rng.randrange(LENGTH + 1)
        prefix = TieredMatcher(managers).find(
            request.hashes,
            most,
            lambda *key: key in stored,  # noqa: B023 (called at once)
        )
        pools = [in_pool(worker, manager.group) for manager in managers]
        step = managers[0].alignment_tokens
        expected = max(
            (
                end
                for end in range(step, most + 1, step)
                if all(
                    has_all(
                        sorted(needed(m.spec, end)),  # type: ignore[arg-type]
                        pools[m.group],
                        tiers[m.group],
                    )
                    for m in managers
                )
            ),
            default=0,
        )
        assert prefix.num_tokens == expected, f"seed {seed}"
        found_lengths.add(expected)
        if not expected:
            continue
        reservation = worker.pulls.reserve(request, expected, LENGTH, prefix.hit)
        assert reservation is not None
        for manager, lacks in zip(managers, reservation.lacks, strict=True):
            size = manager.blocks_per_state
            lacked = {index // size for index, _ in lacks}
            assert lacked <= tiers[manager.group], f"seed {seed}"
            table = worker.kv.tables.blocks(request.key)[manager.group]
            chain = manager.chain(request.hashes)
            for place in needed(manager.spec, expected) - lacked:  # type: ignore[arg-type]
                own = table[place * size : (place + 1) * size]
                assert own == manager.cached_blocks(chain[place]) != [NULL_BLOCK] * size
        worker.kv.check()
        worker.kv.commit_external(request.key)
        again = worker.kv.find_longest_cache_hit(worker.request(LENGTH), expected)
        # A state whose first block has followers of an earlier one stays private.
        assert again.num_tokens == expected or layout == "states", f"seed {seed}"
        worker.kv.free(request.key)
        worker.kv.check()
    assert len(found_lengths) > 2, "the random caches must differ"


@pytest.mark.parametrize("lost", range(2))
def test_a_state_of_several_blocks_counts_whole(lost: int) -> None:
    worker = Worker("states")
    (state,) = [manager for manager in worker.kv.managers if manager.blocks_per_state > 1]
    request = worker.request(LENGTH)
    stored = {
        (manager.group, one)
        for manager in worker.kv.managers
        for value in manager.chain(request.hashes)
        for one in manager.stored_values(value)
    }
    matcher = TieredMatcher(worker.kv.managers)
    assert matcher.find(request.hashes, LENGTH, lambda *key: key in stored).num_tokens == 44
    parts = state.stored_values(state.chain(request.hashes)[10])
    assert len(parts) == state.blocks_per_state > 1
    stored.discard((state.group, parts[lost]))
    assert matcher.find(request.hashes, LENGTH, lambda *key: key in stored).num_tokens == 40
