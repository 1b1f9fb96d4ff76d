"""Slots of a sequence: one for each token, and some behind them for drafts."""

import pytest

from disagg.errors import InvariantViolation
from disagg.kv.sequence import KVSequence, SequenceState
from disagg.kv.slots import Slots

MAX_TOKENS, DRAFTS = 40, 3


def slots_of(num_scheduled: int, room_end: int) -> tuple[Slots, SequenceState]:
    state = SequenceState(KVSequence("a"), num_scheduled, num_scheduled, room_end=room_end)
    return Slots({"a": state}, DRAFTS, MAX_TOKENS), state


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 3), (10, 13), (38, 40), (40, 40)])
def test_none_is_past_the_longest_sequence(num_tokens: int, expected: int) -> None:
    slots, _ = slots_of(8, 12)
    assert slots.total(num_tokens) == expected


@pytest.mark.parametrize(
    ("num_scheduled", "room_end", "expected"), [(8, 8, 0), (8, 10, 2), (8, 16, 3), (39, 44, 1)]
)
def test_drafts_have_what_room_there_is(num_scheduled: int, room_end: int, expected: int) -> None:
    slots, _ = slots_of(num_scheduled, room_end)
    assert slots.num_for_drafts("a") == expected


def test_right_drafts_are_scheduled_tokens_as_far_as_they_had_slots() -> None:
    slots, state = slots_of(8, 10)
    with pytest.raises(InvariantViolation, match="no slots"):
        slots.accept_drafts("a", 3)
    assert state.num_scheduled == 8
    slots.accept_drafts("a", 2)
    assert (state.num_scheduled, slots.num_for_drafts("a")) == (10, 0)


def test_a_sequence_that_has_not_begun_is_refused_by_name() -> None:
    slots, _ = slots_of(8, 10)
    with pytest.raises(InvariantViolation, match="'b' has no tables"):
        slots.num_for_drafts("b")
