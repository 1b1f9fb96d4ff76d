"""What became of a copy at all ranks: missing at one, damaged at one, late, out of order."""

import itertools
import random

import pytest

from disagg.errors import InvariantViolation
from disagg.scheduling.actions import TierKey
from disagg.scheduling.tiers.rank_ends import RankEnds, known_to_all

A, B, C, D = keys = [(0, name.encode()) for name in "abcd"]


def test_a_copy_ends_with_its_last_rank() -> None:
    ends = RankEnds(3)
    ends.begin_write(1)
    assert ends.written(2, 1, [A, B], [], "") is None
    assert ends.written(0, 1, [A, B], [], "") is None
    assert ends.written(1, 1, [A, B], [], "") == ((A, B), (), "")
    ends.begin_read(1, 2)  # the id is free again
    assert ends.was_read(1, 1, [True, True]) is None
    assert ends.was_read(0, 1, [True, True]) is None
    assert ends.was_read(2, 1, [True, True]) == (True, True)


def test_what_one_rank_did_not_store_is_not_stored() -> None:
    ends = RankEnds(2)
    ends.begin_write(1)
    assert ends.written(0, 1, [A, C], [], "") is None
    assert ends.written(1, 1, [B, A], [], "slow") == ((A,), (), "rank 1: slow")


def test_what_one_rank_gave_up_is_gone() -> None:
    ends = RankEnds(2)
    ends.begin_write(1)
    assert ends.written(0, 1, [A, B], [C], "") is None
    assert ends.written(1, 1, [A, B], [B, D], "") == ((A,), (C, B, D), "")


@pytest.mark.parametrize("at_rank", range(3))
def test_a_block_that_is_damaged_at_one_rank_is_a_miss(at_rank: int) -> None:
    ends = RankEnds(3)
    ends.begin_read(5, 3)
    for rank in (0, 1, 2):
        found = ends.was_read(rank, 5, [True, rank != at_rank, True])
    assert found == (True, False, True)


def test_a_read_of_nothing_ends_as_well() -> None:
    ends = RankEnds(2)
    ends.begin_read(5, 0)
    assert ends.was_read(0, 5, []) is None
    assert ends.was_read(1, 5, []) == ()


def test_a_late_rank_does_not_bring_back_what_another_gave_up() -> None:
    """Rank 0 gives A up for the second write before rank 1 has ended the first."""
    ends = RankEnds(2)
    ends.begin_write(1)
    ends.begin_write(2)
    assert ends.written(0, 1, [A, B], [], "") is None
    assert ends.written(0, 2, [C], [A], "") is None
    assert ends.written(1, 2, [C], [], "") == ((C,), (A,), "")
    assert ends.written(1, 1, [A, B], [], "") == ((B,), (), "")


def test_what_a_rank_has_yet_to_store_is_not_touched_by_what_it_gave_up_before() -> None:
    ends = RankEnds(2)
    ends.begin_write(1)
    ends.begin_write(2)
    assert ends.written(1, 1, [A], [], "") is None
    assert ends.written(0, 2, [C], [A], "") is None  # an older A; the new one comes
    assert ends.written(0, 1, [A], [], "") == ((A,), (), "")


def test_a_tier_is_empty_when_all_ranks_have_emptied_it() -> None:
    ends = RankEnds(2)
    ends.begin_clear("disk")
    ends.begin_clear("host")
    assert ends.cleared(0, "disk", "") is None
    assert ends.cleared(1, "host", "") is None
    assert ends.cleared(1, "disk", "read-only") == "rank 1: read-only"
    assert ends.cleared(0, "host", "") == ""


def test_ranks_that_say_what_nobody_asked_are_a_bug() -> None:
    ends = RankEnds(2)
    ends.begin_write(1)
    ends.written(0, 1, [A], [], "")
    for again in (
        lambda: ends.written(0, 1, [A], [], ""),
        lambda: ends.was_read(0, 1, [True]),
        lambda: ends.cleared(0, "disk", ""),
    ):
        with pytest.raises(InvariantViolation, match="rank 0"):
            again()


def test_known_is_what_all_ranks_have() -> None:
    assert known_to_all([[C, A, B], [A, B, C], [B, D, C]]) == (C, B)
    assert known_to_all([[A, B]]) == (A, B)
    assert known_to_all([[A], []]) == ()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_believed_is_at_every_rank(seed: int) -> None:
    """Ranks with room for three blocks end writes one by one, each in its own time."""
    rng = random.Random(seed)
    ends, stores = RankEnds(2), [dict[TierKey, None](), dict[TierKey, None]()]
    believed: set[TierKey] = set()
    waiting: list[list[tuple[int, TierKey]]] = [[], []]
    numbers = itertools.count()
    for _ in range(200):
        rank = rng.randrange(2)
        if not waiting[rank]:
            busy = {key for queue in waiting for _, key in queue}
            free = [key for key in keys if key not in busy | believed]
            if free:
                copy_id, key = next(numbers), rng.choice(free)
                ends.begin_write(copy_id)
                for queue in waiting:
                    queue.append((copy_id, key))
            continue
        copy_id, key = waiting[rank].pop(0)
        store = stores[rank]
        store.pop(key, None)
        evicted = [next(iter(store))] if len(store) == 3 else []
        for gone in evicted:
            del store[gone]
        store[key] = None
        if (written := ends.written(rank, copy_id, [key], evicted, "")) is not None:
            believed |= set(written[0])
            believed -= set(written[1])
        if not any(waiting):
            assert all(believed <= set(store) for store in stores), (believed, stores)
    assert believed
