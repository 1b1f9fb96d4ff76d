"""What moves is exactly what a window needs, and every block that moved matters."""

from functools import partial
from typing import Any

import pytest
from openai.types import Completion

from tests.process.served_model import (
    BLOCK_TOKENS,
    WINDOW,
    Expected,
    ServedModel,
    WrongAnswerError,
    assert_exact,
    handed_over,
    is_exact,
)

pytestmark = pytest.mark.timeout(600)

BY_HAND = {
    # The first generated token stands at position `length` and sees the 31 before it.
    1: "p",
    15: "p",
    16: "p",
    17: "pp",
    31: "pp",  # 0..30
    32: "pp",  # 1..31
    33: "ppp",  # 2..32
    46: "ppp",  # 15..45: one token of block 0
    47: ".pp",  # 16..46: none
    48: ".pp",
    49: ".ppp",
    62: ".ppp",  # 31..61
    63: "..pp",  # 32..62
    64: "..pp",
    65: "..ppp",
    150: ".......ppp",  # 119..149
    257: "..............ppp",  # 226..256
}
"""Prompt length: what of a window group is pulled (p) and what never exists (.)."""

PAGE_BYTES = 2 * 2 * 16 * 16 * 4
"""K and V, two heads, 16 tokens, 16 elements, four bytes."""
NUM_WINDOW_GROUPS = 5
GROUPS = range(6)
"""Of the shared checkpoint: five window layers and one full, a group each."""
PADDED_GROUPS = range(3)
LENGTH = 145
"""The window's first block has 14 of its 16 tokens in the window: positions 114..127."""


def groups_of(generation: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = generation["transfer"]["groups"]
    return groups


def in_window_map(length: int) -> str:
    """Which blocks hold a token that a query at position ``length`` sees, one by one."""
    blocks = range(-(-length // BLOCK_TOKENS))
    seen = [
        any(
            length - t < WINDOW
            for t in range(b * BLOCK_TOKENS, min((b + 1) * BLOCK_TOKENS, length))
        )
        for b in blocks
    ]
    return "".join("p" if visible else "." for visible in seen)


def assert_answer(completion: Completion, expected: Expected, record: dict[str, Any]) -> None:
    """What every test of equality asks for."""
    assert_exact(completion, expected)
    handed_over(record)


def test_the_table_is_what_a_window_means() -> None:
    assert {length: in_window_map(length) for length in BY_HAND} == BY_HAND


def test_the_blocks_pulled_are_those_in_the_window(gemma3: ServedModel) -> None:
    for length, block_map in BY_HAND.items():
        generation = gemma3.serve(gemma3.prompt(length, 6))
        *windows, full = groups_of(generation)
        assert len(windows) == NUM_WINDOW_GROUPS
        for group in windows:
            assert (group["kind"], group["window_tokens"]) == ("sliding_window", WINDOW)
            assert group["block_map"] == block_map
            assert group["pulled_blocks"] == block_map.count("p")
        assert (full["kind"], full["window_tokens"]) == ("full_attention", 0)
        assert full["block_map"] == "p" * len(block_map)
        for group in groups_of(generation):
            assert group["full_blocks"] == len(block_map)
            assert group["pulled_bytes"] == group["pulled_blocks"] * PAGE_BYTES
            assert group["useful_bytes"] == group["pulled_bytes"]  # a layer fills a block
            assert group["full_bytes"] == len(block_map) * PAGE_BYTES


def test_a_hit_moves_less_of_full_attention_only(gemma3: ServedModel) -> None:
    expected = gemma3.prompt(150, 6)
    gemma3.serve(expected)
    *windows, full = groups_of(gemma3.serve(expected))
    assert full["block_map"] == "hhhhhhhhhp"
    assert {group["block_map"] for group in windows} == {BY_HAND[150]}


def test_padding_is_reported_apart(gemma2: ServedModel) -> None:
    """Three full layers fill a block; four window layers lie in two groups, two of three pages."""
    *windows, full = groups_of(gemma2.serve(gemma2.prompt(150)))
    assert len(windows) == 2
    for group in windows:
        assert (group["block_map"], group["pulled_blocks"]) == (BY_HAND[150], 3)
        assert group["pulled_bytes"] == 3 * 3 * PAGE_BYTES
        assert group["useful_bytes"] == 3 * 2 * PAGE_BYTES
    assert full["pulled_blocks"] == 10
    assert full["pulled_bytes"] == full["useful_bytes"] == 10 * 3 * PAGE_BYTES


def corrupted_answer(served: ServedModel, expected: Expected, group: int) -> None:
    """Ask while one pulled block of a group is overwritten; then check as always."""
    told = served.cluster.tell("d0", f"corrupt {group}")
    request_id = served.new_id()
    completion = served.ask(expected, request_id)
    served.cluster.wait_told("d0", f"corrupted {group} ", told)
    assert_answer(completion, expected, served.cluster.record(request_id))


@pytest.mark.parametrize("group", GROUPS)
def test_one_corrupted_block_of_any_group_fails(gemma3: ServedModel, group: int) -> None:
    """Control: the same comparison that passes without the corruption fails with it."""
    expected = gemma3.prompt(LENGTH)
    gemma3.serve(expected)
    gemma3.cluster.tell("d0", "forget")
    with pytest.raises(WrongAnswerError):
        corrupted_answer(gemma3, expected, group)
    gemma3.cluster.tell("d0", "intact")
    gemma3.cluster.tell("d0", "forget")
    gemma3.serve(expected)


@pytest.mark.parametrize("group", PADDED_GROUPS)
def test_one_corrupted_block_of_any_group_of_padded_blocks_fails(
    gemma2: ServedModel, group: int
) -> None:
    with pytest.raises(WrongAnswerError):
        corrupted_answer(gemma2, gemma2.prompt(LENGTH), group)


def test_a_block_that_was_never_written_fails_the_step(gemma3: ServedModel) -> None:
    """Control: the NaN that stands in all free blocks is seen wherever one is read.

    One pulled block of each group in turn stays as it was before the READ. What the client gets
    is the reference's tokens all the same, computed anew, or an error.
    """
    for group in GROUPS:
        expected = gemma3.prompt(LENGTH, salt=f"group {group}")
        told = gemma3.cluster.tell("d0", f"unwritten {group}")
        request_id = gemma3.new_id()
        is_exact(partial(gemma3.ask, expected, request_id), expected)
        gemma3.cluster.wait_told("d0", f"corrupted {group} ", told)
        first, *_ = gemma3.cluster.record(request_id)["generations"]
        assert first["cause"].startswith("step_failed"), first
        assert "not finite" in first["cause"]
        gemma3.cluster.tell("d0", "intact")


def test_a_window_computed_too_small_is_seen(gemma3: ServedModel) -> None:
    """Control: the table above, the null entries and the client's answer each show it.

    The decode worker's window is a block short: it neither reserves nor pulls the first block
    that its window covers.
    """
    expected = gemma3.prompt(LENGTH)
    gemma3.cluster.tell("d0", f"narrow {BLOCK_TOKENS}")
    is_exact(partial(gemma3.ask, expected, "narrow"), expected)
    record = gemma3.cluster.record("narrow")
    first, *_ = record["generations"]
    assert [g["block_map"] for g in groups_of(first)[:-1]] == [
        ".......ppp".replace("p", ".", 1)
    ] * 5
    assert first["cause"].startswith("step_failed")
    assert "null block" in first["cause"]
    with pytest.raises(AssertionError):
        handed_over(record)
