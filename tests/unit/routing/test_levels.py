"""Levels: from which boundaries of a prompt who can go on, looked for from its end down."""

from collections.abc import Callable
from functools import reduce
from operator import and_

import pytest

from disagg.kv.kinds.registry import KINDS as REGISTERED
from disagg.routing import boundaries as boundaries_module
from disagg.routing import levels as levels_module
from disagg.routing.boundaries import Trailing
from disagg.routing.levels import levels
from tests.unit.routing.test_index import check_against_brute_force, first_needed, group


@pytest.fixture
def _looked_up_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts this short would be looked up in one part otherwise."""
    monkeypatch.setattr(boundaries_module, "_FEW", 0)
    monkeypatch.setattr(boundaries_module, "_BLOCKS_MIN", 1)
    monkeypatch.setattr(levels_module, "_STEPS_MAX", 1)
    monkeypatch.setattr(levels_module, "_SWEEP_RUNS", 2)


@pytest.mark.usefixtures("_looked_up_in_parts")
def test_equals_brute_force_looked_up_in_parts() -> None:
    for seed in range(400, 1000):
        check_against_brute_force(seed)


def nobody_has_anything_lower(self: Trailing, block: int) -> None:
    if not self._starts or block < self._starts[-1]:
        self._starts.append(block)
        self._masks.append(0)


def _nothing_is_left_out(self: Trailing, block: int) -> None:
    low = self._starts[-1] if self._starts else self.num_blocks
    if block < low - 1:  # its own holders, taken for those of all up to ``low``
        self._starts.append(block)
        self._masks += self._runs(block, block + 1)[1]
    elif block < low:
        self._starts.append(block)
        self._masks += self._runs(block, low)[1]


def _no_boundary_without_needs(self: Trailing, num_blocks: int, start: int) -> int:
    return start


@pytest.mark.usefixtures("_looked_up_in_parts")
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_look_down_to", nobody_has_anything_lower),
        ("_look_down_to", _nothing_is_left_out),
        ("_worth", _no_boundary_without_needs),
        ("lacking", lambda *_: 0),
    ],
)
def test_control_a_wrong_look_from_the_end_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., int | None]
) -> None:
    monkeypatch.setattr(Trailing, name, broken)
    with pytest.raises(AssertionError, match="seed"):
        test_equals_brute_force_looked_up_in_parts()


class CountedSet(int):
    """A bit set that counts how often one is ANDed."""

    num_ands = 0

    def __and__(self, other: int) -> "CountedSet":
        CountedSet.num_ands += 1
        return CountedSet(int(self) & int(other))

    __rand__ = __and__


def num_ands(kind: str, window_tokens: int, num_workers: int) -> int:
    """Work of all levels of a prompt of which worker ``i`` holds all but the last ``i`` blocks."""
    CountedSet.num_ands = 0
    everybody = (1 << num_workers) - 1
    masks: list[int] = [CountedSet(everybody >> i) for i in range(num_workers)]
    part = Trailing(group(kind, 4, window_tokens), blocks_of(masks), num_workers)
    assert len(list(levels([part], 4, 4 * num_workers, everybody))) > 0
    return CountedSet.num_ands


def blocks_of(masks: list[int]) -> Callable[[int, int], tuple[list[int], list[int]]]:
    """Holders of each block, as runs of one block."""
    return lambda begin, end: (list(range(begin, end)), masks[begin:end])


ROUTED = [kind for kind in REGISTERED if kind != "cross_attention"]


@pytest.mark.parametrize("kind", ROUTED)
@pytest.mark.parametrize("window_tokens", [6, 64, 4096])
def test_levels_are_linear_in_runs_whatever_the_window(kind: str, window_tokens: int) -> None:
    assert num_ands(kind, window_tokens, 1024) <= 6 * 1024


def test_control_a_window_that_is_walked_anew_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(self: Trailing, top: int, bottom: int) -> int:
        return reduce(and_, self._masks[top:bottom])

    monkeypatch.setattr(Trailing, "_window", again)
    assert num_ands("sliding_window", 2048, 1024) > 100 * 1024


@pytest.mark.parametrize("kind", ROUTED)
@pytest.mark.parametrize("window_tokens", [1, 2, 3, 5, 6, 10, 16])
def test_what_is_needed_never_goes_down_and_is_what_the_next_token_sees(
    kind: str, window_tokens: int
) -> None:
    info, before = group(kind, 4, window_tokens), 0
    for num_blocks in range(1, 40):
        first = REGISTERED[kind].first_needed(info, num_blocks)
        assert before <= first <= num_blocks, "levels look at a run's last boundary only"
        if first < num_blocks:
            assert first == first_needed(info, 4 * num_blocks) // 4
        before = first
