"""One block is kept back per block that a promise counts on while others hold it."""

import pytest

from disagg.errors import InvariantViolation
from disagg.kv.blocks.slack import Slack


@pytest.fixture
def holds() -> dict[int, int]:
    """Holds by block."""
    return {1: 1, 2: 2, 3: 3}


@pytest.fixture
def slack(holds: dict[int, int]) -> Slack:
    return Slack(holds.__getitem__)


def test_of_an_expected_block_every_hold_but_one_keeps_a_block_back(slack: Slack) -> None:
    """No more than there are promises that expect it: the others' drops count on nothing."""
    slack.expect_back([1, 2, 3], 1)
    assert slack.num_blocks == 2
    slack.expect_back([3], 1)
    assert slack.num_blocks == 3
    slack.expect_back([3], 1)
    assert slack.num_blocks == 3, "it has three holds"
    slack.check()
    slack.expect_back([1, 2, 3], -1)
    slack.expect_back([3], -2)
    assert slack.num_blocks == 0
    assert not slack.expected
    slack.check()


def test_it_follows_the_holds(slack: Slack, holds: dict[int, int]) -> None:
    slack.expect_back([1], 1)
    holds[1] = holds[2] = 2
    slack.holds_changed([1, 2])
    assert slack.num_blocks == 1
    slack.check()
    holds[1] = 0
    slack.holds_changed([1])
    assert slack.num_blocks == 0
    slack.check()


@pytest.mark.parametrize("extra", [0, 1])
def test_growth_is_what_one_more_hold_of_each_adds(
    slack: Slack, holds: dict[int, int], extra: int
) -> None:
    slack.expect_back([1, 3], 1)
    before, foreseen = slack.num_blocks, slack.growth([1, 2, 3], extra)
    for block in holds:
        holds[block] += 1
    slack.holds_changed(holds)
    slack.expect_back(list(holds), extra)
    assert slack.num_blocks - before == foreseen


def test_control_a_change_that_nobody_told_of_is_found(slack: Slack, holds: dict[int, int]) -> None:
    slack.expect_back([1], 1)
    holds[1] = 2
    with pytest.raises(InvariantViolation, match="slack"):
        slack.check()
