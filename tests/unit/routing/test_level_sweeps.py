"""Stretches of runs whose levels are found at once, as where other groups have the same runs."""

import random
from collections.abc import Callable, Sequence
from operator import and_

import pytest

from disagg.messages.identity import Incarnation
from disagg.messages.kv_events import BlocksRemoved, BlocksStored, KVEvent
from disagg.routing import levels as levels_module
from disagg.routing.index import PrefixIndex
from disagg.routing.levels import Leading, Trailing
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
            index.apply(worker, index.next_sequence(worker), False, events)
    found = index.match(4 * NUM_BLOCKS + 1, hashes)
    for worker, keys in held.items():
        usable, _ = brute_force(groups, keys, 4 * NUM_BLOCKS + 1, hashes, 4)
        assert found[worker].usable_tokens == usable, f"seed {seed}"


def test_sweeps_equal_brute_force() -> None:
    for seed in range(300):
        check(seed)


def test_sweeps_are_made_where_groups_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[bool] = []

    def counted(self: Trailing, *args: object) -> bool:
        swept.append(adds_nothing(self, *args))  # type: ignore[arg-type]
        return swept[-1]

    monkeypatch.setattr(Trailing, "adds_nothing", counted)
    test_sweeps_equal_brute_force()
    assert swept.count(True) > 300
    assert swept.count(False) > 100


adds_nothing = Trailing.adds_nothing


def _as_far_as_the_boundaries_go(
    self: Trailing, leading: Leading, ends: Sequence[int], masks: Sequence[int]
) -> bool:
    """What the lowest boundary needs below it is not looked at."""
    starts, wanted = leading.between(ends[0] - 1, ends[-1])
    mine, holders = self._runs(ends[0] - 1, ends[-1])
    missing = masks[0] & ~masks[-1]
    theirs = [mask & missing for mask in wanted]
    return list(mine) == list(starts) and theirs == list(map(and_, theirs, holders))


def _a_block_less_at_its_end(
    self: Trailing, leading: Leading, ends: Sequence[int], masks: Sequence[int]
) -> bool:
    """The last boundary that needs a run is taken for one that does not."""
    after = self._after
    self._after = [max(0, boundary - 1) for boundary in after]
    try:
        return adds_nothing(self, leading, ends, masks)
    finally:
        self._after = after


def _nobody_goes_on_at_the_lowest(
    self: Trailing, leading: Leading, ends: Sequence[int], masks: Sequence[int]
) -> bool:
    return adds_nothing(self, leading, ends, [masks[1], *masks[1:]])


def _nobody_goes_on_at_the_highest(
    self: Trailing, leading: Leading, ends: Sequence[int], masks: Sequence[int]
) -> bool:
    return adds_nothing(self, leading, ends, [*masks[:-1], masks[-2]])


@pytest.mark.parametrize(
    "broken",
    [
        lambda *_: True,
        _as_far_as_the_boundaries_go,
        _a_block_less_at_its_end,
        _nobody_goes_on_at_the_lowest,
        _nobody_goes_on_at_the_highest,
    ],
)
def test_control_a_sweep_that_sees_too_little_is_found(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., bool]
) -> None:
    monkeypatch.setattr(Trailing, "adds_nothing", broken)
    with pytest.raises(AssertionError, match="seed"):
        test_sweeps_equal_brute_force()
