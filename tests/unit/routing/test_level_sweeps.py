"""Stretches of runs whose levels are found at once, as where other groups have the same runs."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from disagg.kv.kinds.registry import KINDS
from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import BlocksRemoved, BlocksStored, KVEvent
from disagg.routing import boundaries as boundaries_module
from disagg.routing import levels as levels_module
from disagg.routing.boundaries import Leading, Trailing
from disagg.routing.index import PrefixIndex
from tests.unit.routing.test_index import brute_force, chain, group

NUM_BLOCKS, PIECE_BLOCKS = 48, 3
HYBRIDS = [
    [group("full_attention")],
    [group("full_attention"), group("sliding_window", 4, 21)],
    [group("full_attention"), group("chunked_local", 4, 32), group("linear_state")],
]


@pytest.fixture(autouse=True)
def _sweeps_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels_module, "_STEPS_MAX", 1)
    monkeypatch.setattr(levels_module, "_SWEEP_RUNS", 2)


def check(seed: int) -> None:
    """Beginnings and what is missing in them end with pieces, so that all groups have like runs.

    Or groups but the first one have runs of their own: what a few boundaries need.
    """
    rng, hashes = random.Random(seed), chain(4 * NUM_BLOCKS)
    unlike = rng.random() < 0.5
    groups = rng.choice(HYBRIDS)
    index = PrefixIndex(groups, 4)
    held: dict[Incarnation, set[tuple[int, bytes]]]
    held = {Incarnation(str(number), "1"): set() for number in range(8)}
    for worker, keys in held.items():
        index.add(worker, 1000)
        blocks = tuple(hashes[: PIECE_BLOCKS * rng.randint(1, NUM_BLOCKS // PIECE_BLOCKS)])
        for number in range(len(groups)):
            keys |= {(number, value) for value in blocks}
            first = PIECE_BLOCKS * rng.randrange(NUM_BLOCKS // PIECE_BLOCKS)
            gone = hashes[first : first + PIECE_BLOCKS] if number and rng.random() < 0.3 else []
            if unlike and number:
                gone = hashes[: max(0, len(blocks) - rng.choice((1, 5, 6, 7, 9, 16)))]
            keys -= {(number, value) for value in gone}
            events: list[KVEvent] = [
                BlocksStored(number, blocks, None, 0, 4),
                BlocksRemoved(number, tuple(gone)),
            ]
            index.apply(worker, index.next_sequence(worker), None, events)
    found = index.match(4 * NUM_BLOCKS + 1, hashes)
    lengths = [tokens for tokens, _ in found.usable]
    assert lengths == sorted(set(lengths), reverse=True), f"seed {seed}: a length twice"
    for worker, keys in held.items():
        usable, _ = brute_force(groups, keys, 4 * NUM_BLOCKS + 1, hashes, 4)
        assert found[worker].usable_tokens == usable, f"seed {seed}"


def test_sweeps_equal_brute_force() -> None:
    for seed in range(300):
        check(seed)


def test_who_cannot_go_on_where_the_first_group_ends_is_found_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []

    def counted(self: Trailing, *args: object) -> int:
        found = lacking(self, *args)  # type: ignore[arg-type]
        counts.append(found.bit_count())
        return found

    monkeypatch.setattr(Trailing, "lacking", counted)
    test_sweeps_equal_brute_force()
    assert counts.count(0) > 150
    assert sum(map(bool, counts)) > 100


lacking = Trailing.lacking


def check_who_lacks(seed: int) -> bool:
    """Runs of eight workers in two groups; whether any of them lacks something at its end."""
    rng = random.Random(seed)
    window = group("sliding_window", 4, rng.choice((5, 21)))
    ends = sorted(rng.sample(range(1, NUM_BLOCKS), 8))
    starts, masks = [0, *ends[:-1]], [255 >> number << number for number in range(8)]
    blocks = [0] * NUM_BLOCKS
    for number, end in enumerate(ends):
        first = KINDS[window.kind].first_needed(window, end)
        for block in range(max(0, first - rng.choice((0, 0, 2))), end - rng.choice((0, 0, 0, 1))):
            blocks[block] |= 1 << number

    def held(begin: int, end: int) -> tuple[list[int], list[int]]:
        begins = [at for at in range(begin, end) if at == begin or blocks[at] != blocks[at - 1]]
        return begins, [blocks[at] for at in begins]

    one, low = Trailing(window, held, ends[-1]), rng.randrange(7)
    leading = Leading(group("full_attention"), starts, masks, ends[-1])
    found = one.lacking(leading, ends[low:], [*masks[low:], 0])
    wanted = 0
    for number in range(low, 8):
        first = KINDS[window.kind].first_needed(window, ends[number])
        if not all(blocks[at] >> number & 1 for at in range(first, ends[number])):
            wanted |= 1 << number
    assert found == wanted, f"seed {seed}"
    return wanted != 0


def test_nobody_is_found_apart_without_need() -> None:
    lacks = [check_who_lacks(seed) for seed in range(300)]
    assert 50 < sum(lacks) < 250


def test_control_who_is_found_apart_without_need_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trailing, "lacking", _a_block_more)
    with pytest.raises(AssertionError, match="seed"):
        test_nobody_is_found_apart_without_need()


def _a_block_more(
    self: Trailing, leading: Leading, ends: Sequence[int], masks: Sequence[int]
) -> int:
    """Each boundary is taken to need a block more than it does."""
    self._firsts = [max(0, first - 1) for first in self._firsts]
    return lacking(self, leading, ends, masks)


def _as_far_as_the_boundaries_go(
    self: Trailing, leading: Leading, ends: Sequence[int], masks: Sequence[int]
) -> int:
    """What the lowest boundary needs below it is not looked at."""
    firsts = self._firsts
    self._firsts = [max(first, min(ends[0], at) - 1) for at, first in enumerate(firsts)]
    try:
        return lacking(self, leading, ends, masks)
    finally:
        self._firsts = firsts


def _a_block_less(
    self: Trailing, leading: Leading, ends: Sequence[int], masks: Sequence[int]
) -> int:
    """Each boundary is taken to need a block less than it does."""
    firsts = self._firsts
    self._firsts = [min(first + 1, at) for at, first in enumerate(firsts)]
    try:
        return lacking(self, leading, ends, masks)
    finally:
        self._firsts = firsts


def _nobody_goes_on_at_the_lowest(
    self: Trailing, leading: Leading, ends: Sequence[int], masks: Sequence[int]
) -> int:
    return lacking(self, leading, ends, [masks[1], *masks[1:]])


def _nobody_goes_on_at_the_highest(
    self: Trailing, leading: Leading, ends: Sequence[int], masks: Sequence[int]
) -> int:
    return lacking(self, leading, ends, [*masks[:-1], masks[-2]])


@pytest.mark.parametrize(
    "broken",
    [
        lambda *_: 0,
        _as_far_as_the_boundaries_go,
        _a_block_less,
        _nobody_goes_on_at_the_lowest,
        _nobody_goes_on_at_the_highest,
    ],
)
def test_control_a_sweep_that_sees_too_little_is_found(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., int]
) -> None:
    monkeypatch.setattr(Trailing, "lacking", broken)
    with pytest.raises(AssertionError, match="seed"):
        test_sweeps_equal_brute_force()


def _only_below_the_stretch(self: Trailing, bits: int, low: int, end: int) -> Trailing:
    """What the lowest boundaries of a stretch need below it is not looked at."""
    one = narrowed(self, bits, low, end)
    one._starts = [max(start, low) for start in one._starts]
    one._masks = [
        mask if start > low else 0 for start, mask in zip(one._starts, one._masks, strict=True)
    ]
    return one


def _anybody(self: Trailing, bits: int, low: int, end: int) -> Trailing:
    """Runs at which somebody else begins or ceases are taken for one."""
    one = narrowed(self, bits, low, end)
    one._masks = [one._masks[0] for _ in one._masks]
    return one


narrowed = Trailing.narrowed


@pytest.mark.parametrize("broken", [_only_below_the_stretch, _anybody])
def test_control_too_few_runs_of_who_is_found_apart_are_found(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Trailing]
) -> None:
    monkeypatch.setattr(Trailing, "narrowed", broken)
    with pytest.raises(AssertionError, match="seed"):
        test_sweeps_equal_brute_force()


def num_looked_at(share_irregular: float) -> int:
    """Boundaries looked at for all levels of 200 workers, some of which lack their last block."""
    hashes, groups = chain(4 * 400), HYBRIDS[1]
    index, rng = PrefixIndex(groups, 4), random.Random(1)
    for number in range(200):
        worker = Incarnation(str(number), "1")
        index.add(worker, 1000)
        end = rng.randint(20, 400)
        last = tuple(hashes[end - 10 : end - int(rng.random() < share_irregular)])
        events: list[KVEvent] = [BlocksStored(0, tuple(hashes[:end]), None, 0, 4)]
        index.apply(worker, 0, None, [*events, BlocksStored(1, last, None, 0, 4)])
    looked_at = 0

    def counted(self: Leading, num_blocks: int) -> tuple[int, int]:
        nonlocal looked_at
        looked_at += 1
        return at(self, num_blocks)

    at = Leading.at
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Leading, "at", counted)
        assert list(index.match(1601, hashes).usable)
    return looked_at


def test_few_irregular_workers_cost_few_looks() -> None:
    assert num_looked_at(0.05) < 100


def test_control_looking_at_every_boundary_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def everybody(starts: Sequence[int], masks: Sequence[int], bits: int) -> tuple[Any, Any]:
        return list(starts), [mask & bits for mask in masks]

    monkeypatch.setattr(boundaries_module, "narrowed", everybody)
    assert num_looked_at(0.05) > 120
