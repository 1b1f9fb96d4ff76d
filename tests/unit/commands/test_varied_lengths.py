"""Prompts of measurements have other lengths each time, and the meant one in the middle."""

import pytest

from disagg.commands.varied_lengths import varied_length


@pytest.mark.parametrize("num_tokens", [16, 48, 240, 960, 4_096])
def test_lengths_are_spread_evenly_around_the_one_that_is_meant(num_tokens: int) -> None:
    repeats = 5
    for _ in range(100):
        found = [varied_length(num_tokens, number, repeats) for number in range(repeats)]
        assert found == sorted(found)
        most = max(8, num_tokens // 16)
        assert all(abs(one - num_tokens) <= most for one in found)
        assert abs(found[2] - num_tokens) <= most / repeats + 1, "the median's is about as meant"


def test_lengths_are_seldom_the_same() -> None:
    found = [varied_length(960, number, 5) for _ in range(10) for number in range(5)]
    assert len(set(found)) > 25


def test_a_prompt_has_a_token() -> None:
    assert {varied_length(1, number, 3) for number in range(3)} == {1}
