"""What a worker tells that is broken, or means harm: blocks whose values have equal beginnings."""

import random
from collections.abc import Sequence

import pytest

from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import BlocksRemoved, BlocksStored, KVEvent
from disagg.routing.chain import Chain
from disagg.routing.index import PrefixIndex
from tests.unit.routing.test_index import group

HARMFUL, OTHER = Incarnation("harmful-0", "1"), Incarnation("other-0", "1")
NUM = 3_000


@pytest.mark.parametrize(
    "first_words",
    [
        [7],
        [n << 60 for n in range(16)],
        [n << 57 for n in range(128)],
        [n << 34 for n in range(16)],
    ],
)
def test_values_alike_cost_no_more_than_others(first_words: list[int]) -> None:
    """Segments that are split because of them would be as many as the memory has room for."""
    index, chance = PrefixIndex([group("full_attention")], 4), random.Random(1)
    for worker in (HARMFUL, OTHER):
        index.add(worker, 2 * NUM)
    alike = [
        chance.choice(first_words).to_bytes(8, "little") + chance.randbytes(24) for _ in range(NUM)
    ]
    others = [chance.randbytes(32) for _ in range(NUM)]
    index.apply(OTHER, 0, None, stored(others))
    index.apply(HARMFUL, 0, None, stored(alike))
    table = index._stores[4]._table
    assert len(table._buckets._firsts) < 64
    assert usable_blocks(index, HARMFUL, alike) == usable_blocks(index, OTHER, others) == NUM

    gone = set(chance.sample(alike, NUM - 500))  # the rest close up
    index.apply(HARMFUL, 1, None, [BlocksRemoved(0, tuple(gone))])
    assert index.num_entries(HARMFUL) == 500
    assert all(table.find(value) >= 0 for value in set(alike) - gone)
    index.remove(HARMFUL)
    assert not any(table.find(value) >= 0 for value in alike)
    assert not table._crowded
    assert usable_blocks(index, OTHER, others) == NUM


def stored(values: list[bytes]) -> list[KVEvent]:
    """They follow one another from the begin of a prompt."""
    return [BlocksStored(0, tuple(values), None, 0, 4)]


def usable_blocks(index: PrefixIndex, worker: Incarnation, values: list[bytes]) -> int:
    """Of a prompt with these values and one more token."""
    return index.match(4 * len(values) + 1, values)[worker].usable_tokens // 4


def test_short_branches_make_no_chains_of_their_own() -> None:
    """Else a million of them, a hundred workers', are all the chains there may be."""
    index, chance = PrefixIndex([group("full_attention")], 4), random.Random(1)
    index.add(OTHER, 100 * NUM)
    shared = [chance.randbytes(32) for _ in range(20)]
    index.apply(OTHER, 0, None, stored(shared))
    tails = [[chance.randbytes(32) for _ in range(3)] for _ in range(NUM)]
    events: list[KVEvent] = [BlocksStored(0, tuple(one), shared[-1], 0, 4) for one in tails]
    index.apply(OTHER, 1, None, events)
    assert len(index._stores[4].chains) < 5
    assert usable_blocks(index, OTHER, [*shared, *tails[7]]) == 23


def test_removals_here_and_there_compare_each_block_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each was compared with all after it, and 4,096 of them stopped the router for a second."""
    index, chance = PrefixIndex([group("full_attention")], 4), random.Random(1)
    index.add(OTHER, NUM)
    values = [chance.randbytes(32) for _ in range(NUM)]
    index.apply(OTHER, 0, None, stored(values))
    has, compared = Chain._has, 0

    def counted(self: Chain, offset: int, some: Sequence[bytes]) -> bool:
        nonlocal compared
        compared += len(some)
        return has(self, offset, some)

    monkeypatch.setattr(Chain, "_has", counted)
    index.apply(OTHER, 1, None, [BlocksRemoved(0, tuple(chance.sample(values, NUM)))])
    assert index.num_entries(OTHER) == index.num_blocks == 0
    assert compared < 4 * NUM


def test_beyond_all_chains_nothing_more_is_kept_and_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("disagg.routing.chain_store.CHAINS_MAX", 4)
    index, chance = PrefixIndex([group("full_attention")], 4), random.Random(1)
    index.add(OTHER, NUM)
    prompts = [[chance.randbytes(32) for _ in range(20)] for _ in range(9)]
    for number, one in enumerate(prompts):
        index.apply(OTHER, number, None, stored(one))
    assert [usable_blocks(index, OTHER, one) for one in prompts] == [20] * 3 + [0] * 6
    assert index.num_entries(OTHER) == 60
    removed: list[KVEvent] = [BlocksRemoved(0, tuple(one)) for one in prompts]
    index.apply(OTHER, 9, None, removed)
    assert index.num_entries(OTHER) == index.num_blocks == 0
    index.apply(OTHER, 18, None, stored(prompts[8]))
    assert usable_blocks(index, OTHER, prompts[8]) == 20


def test_answers_of_two_workers_that_grow_by_turns_are_one_run_of_each() -> None:
    """A mask per block is more than all else that an index keeps of it."""
    index, chance = PrefixIndex([group("full_attention")], 4), random.Random(1)
    index.add(HARMFUL, 100 * NUM)
    index.add(OTHER, 100 * NUM)
    before: dict[Incarnation, bytes | None] = {HARMFUL: None, OTHER: None}
    for number in range(NUM):
        for worker in (HARMFUL, OTHER):
            block = chance.randbytes(32)
            event = BlocksStored(0, (block,), before[worker], 0, 4)
            index.apply(worker, number, None, [event])
            before[worker] = block
    chains = [chain for chain in index._stores[4].chains if chain is not None]
    assert sum(map(len, chains)) == 2 * NUM
    assert sum(len(runs.starts) for one in chains for runs in one.layers if runs is not None) < 9
