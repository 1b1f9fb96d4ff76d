"""What the router knows of tiers: against brute force, and after every kind of news."""

import random

import pytest

from disagg.kv.kinds.registry import KINDS as REGISTERED
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.messages.kv_events import (
    WHOLE,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    TierCleared,
    TierRemoved,
    TierStored,
)
from disagg.messages.registration import GroupInfo
from disagg.routing import prefix_hits
from disagg.routing.boundaries import Trailing
from disagg.routing.index import PrefixHit, PrefixIndex
from disagg.routing.levels import levels
from disagg.routing.prefix_hits import PrefixHits
from tests.unit.routing.test_index import A, B, brute_force, chain, group, random_groups
from tests.unit.routing.test_levels import blocks_of

KEYS_MAX = 1000
Keys = set[tuple[int, bytes]]


def told(index: PrefixIndex, *events: KVEvent) -> None:
    assert index.apply(A, index.next_sequence(A), None, events)


def check_against_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    groups = random_groups(rng)
    index = PrefixIndex(groups, 4)
    hashes = chain(4 * rng.randint(1, 24))
    num_tokens = len(hashes) * 4 + rng.randint(0, 3)
    index.add(B, KEYS_MAX)
    index.add(A, KEYS_MAX, (KEYS_MAX, KEYS_MAX))
    places: list[Keys] = [set(), set(), set()]
    for _ in range(rng.randint(1, 80)):
        number, place = rng.randrange(len(groups)), rng.randrange(3)
        stride = groups[number].block_tokens // 4
        blocks = hashes[stride - 1 :: stride]
        first = rng.randint(0, len(blocks))
        run = tuple(blocks[first : first + rng.randint(1, 24)])
        keys = {(number, value) for value in run}
        if rng.random() < 0.85:
            told(
                index,
                TierStored(place - 1, number, run)
                if place
                else BlocksStored(number, run, None, 0, 4),
            )
            places[place] |= keys
        else:
            told(
                index,
                TierRemoved(place - 1, number, run) if place else BlocksRemoved(number, run),
            )
            places[place] -= keys
        if rng.random() < 0.03:
            told(index, TierCleared(place - 1) if place else AllCleared())
            places[place] = set()
    found = index.match(num_tokens, hashes)
    assert found[B] == PrefixHit(0, (0,) * len(groups)) or any(
        info.kind in ("chunked_local", "sliding_window") for info in groups
    )
    usable, alone = brute_force(groups, places[0], num_tokens, hashes, 4)
    reach, _ = brute_force(groups, set.union(*places), num_tokens, hashes, 4)
    hit = found[A]
    assert (hit.usable_tokens, hit.group_tokens) == (usable, alone), f"seed {seed}: {groups}"
    assert max(hit.usable_tokens, hit.reach_tokens) == reach, f"seed {seed}: {groups}"
    assert dict(hit.loads) == loads_of(groups, places, usable, reach, hashes), f"seed {seed}"
    assert index.num_entries(A) == sum(map(len, places)), f"seed {seed}"
    afresh = index.match(num_tokens, hashes)
    assert loading(afresh) == (2 if reach > usable else 0), f"seed {seed}: {groups}"
    assert afresh.reached_by(A) == (hit.reach_tokens, hit.loads), f"seed {seed}"


def loading(hits: PrefixHits) -> int:
    """Who would load something."""
    return sum({mask for _, mask in hits.loading()})


def loads_of(
    groups: list[GroupInfo], places: list[Keys], usable: int, reach: int, hashes: list[bytes]
) -> dict[int, int]:
    """Blocks to be read per tier: those without which nobody could go on at the boundary."""
    if reach <= usable:
        return {}
    counts: dict[int, int] = {}
    everything = {(g, value) for g in range(len(groups)) for value in hashes}
    for number, info in enumerate(groups):
        stride = info.block_tokens // 4
        for value in hashes[stride - 1 : reach // 4 : stride]:
            without = everything - {(number, value)}
            if brute_force(groups, without, reach + 1, hashes[: reach // 4], 4)[0] == reach:
                continue
            place = next(i for i, keys in enumerate(places) if (number, value) in keys)
            if place:
                counts[place - 1] = counts.get(place - 1, 0) + 1
    return counts


def test_equals_brute_force() -> None:
    for seed in range(200):
        check_against_brute_force(seed)


def test_control_a_window_counted_one_block_short_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = SlidingWindowSpec.first_needed
    monkeypatch.setattr(
        SlidingWindowSpec, "first_needed", lambda info, n: min(n, right(info, n) + 1)
    )
    with pytest.raises(AssertionError, match="seed"):
        test_equals_brute_force()


def test_control_tiers_looked_at_as_far_as_pools_go_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def as_far_as_pools_go(self: PrefixHits) -> bool:
        longest, parts = self._num_tokens_max, [self._leading(0, range(1))]
        self._num_tokens_max = min(one.num_blocks * one.block_tokens for one in parts)
        try:
            return may_help(self)
        finally:
            self._num_tokens_max = longest

    may_help = PrefixHits._tiers_may_help
    monkeypatch.setattr(PrefixHits, "_tiers_may_help", as_far_as_pools_go)
    with pytest.raises(AssertionError, match="seed"):
        test_equals_brute_force()


def who_loads(monkeypatch: pytest.MonkeyPatch, *events: KVEvent) -> int:
    """Who loads something of a prompt; fails if levels have to be found for that."""
    hashes = chain(4 * 8)
    index = PrefixIndex([group("full_attention"), group("sliding_window", 4, 9)], 4)
    index.add(A, KEYS_MAX, (KEYS_MAX,))
    told(index, *(BlocksStored(number, tuple(hashes[:5]), None, 0, 4) for number in (0, 1)))
    told(index, *events)
    monkeypatch.setattr(prefix_hits, "levels", None)
    return loading(index.match(4 * 8 + 1, hashes))


def test_no_levels_are_found_where_tiers_have_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert who_loads(monkeypatch) == 0
    assert who_loads(monkeypatch, TierStored(0, 0, tuple(chain(4 * 8)[6:]))) == 0


def test_control_levels_are_found_where_a_tier_has_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError):
        who_loads(monkeypatch, TierStored(0, 0, tuple(chain(4 * 8)[5:])))


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        *((kind, 0) for kind in ("full_attention", "mla", "linear_state")),
        *((kind, n) for kind in ("sliding_window", "chunked_local") for n in (1, 4, 5, 9, 13, 16)),
    ],
)
def test_what_a_boundary_needs_is_what_makes_it_usable(kind: str, window: int) -> None:
    info, rule = group(kind, 4, window), REGISTERED[kind]
    for num_blocks in range(1, 9):
        first = rule.first_needed(info, num_blocks)
        for missing in range(num_blocks):
            holders = [int(i != missing) for i in range(num_blocks)]
            part = Trailing(info, blocks_of(holders), num_blocks)
            found = levels([part], 4, 4 * num_blocks, 1)
            assert (next(found, None) == [(4 * num_blocks, 1)]) == (missing < first)


def test_a_snapshot_replaces_what_was_known_of_tiers() -> None:
    index = PrefixIndex([group("full_attention")], 4)
    index.add(A, 10, (10,))
    hashes = tuple(chain(16))
    told(index, TierStored(0, 0, hashes))
    index.apply(
        A, 7, WHOLE, [BlocksStored(0, hashes[:1], None, 0, 4), TierStored(0, 0, hashes[:2])]
    )
    assert index.match(17, hashes)[A] == PrefixHit(4, (4,), 8, ((0, 1),))


def test_news_of_tiers_that_were_not_registered_change_nothing() -> None:
    index = PrefixIndex([group("full_attention")], 4)
    index.add(A, 10, (10,))
    index.add(B, 10)
    hashes = tuple(chain(16))
    told(index, TierStored(1, 0, hashes), TierStored(0, 1, hashes), TierCleared(3))
    index.apply(B, 0, None, [TierStored(0, 0, hashes), TierRemoved(0, 0, hashes), TierCleared(0)])
    assert index.num_entries(A) == index.num_entries(B) == 0


def test_no_more_is_kept_of_a_tier_than_it_has_room_for() -> None:
    index = PrefixIndex([group("full_attention")], 4)
    index.add(A, 10, (2,))
    told(index, TierStored(0, 0, tuple(chain(16))))
    assert index.num_entries(A) == 2
    index.remove(A)
    assert index.num_blocks == 0
