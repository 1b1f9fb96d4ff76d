"""What a worker tells that is broken, or means harm: blocks whose values have equal beginnings."""

import random

import pytest

from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import BlocksRemoved, BlocksStored, KVEvent
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
