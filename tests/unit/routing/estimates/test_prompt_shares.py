"""The share of a worker's time that goes to prompts: half its own, half its group's, fading."""

from math import log

import pytest

from disagg.messages.identity import Incarnation
from disagg.routing.estimates.place import StepCost
from disagg.routing.estimates.prompt_shares import HALF_LIFE_MS, OWN_SHARE, PromptShares

COST = StepCost(1, 0.1, 0.2, 1, 0)
A, B, C = (Incarnation(name, "1") for name in "abc")
BOTH, DECODE = ("default", "both"), ("default", "decode")
ONE = 0.1 * 1_000 * log(2) / HALF_LIFE_MS
"""Of 1,000 tokens, just now."""


def group_of(*workers: Incarnation) -> PromptShares:
    shares = PromptShares()
    for one in workers:
        shares.add(0, one, BOTH, 10**6, 0)  # what is told first counts for nothing
    return shares


def test_what_was_computed_fades() -> None:
    shares = group_of(A)
    assert shares.share(0, A, COST) == 0
    shares.add(100, A, BOTH, 1_000, 0)
    assert shares.share(100, A, COST) == pytest.approx(ONE)
    assert shares.share(100 + HALF_LIFE_MS, A, COST) == pytest.approx(ONE / 2)
    assert shares.share(100, A, COST) == pytest.approx(ONE / 2), "time does not go back"
    shares.add(100 + HALF_LIFE_MS, A, BOTH, 0, 250)
    assert shares.share(100 + HALF_LIFE_MS, A, COST) == pytest.approx(ONE)
    shares.add(100 + HALF_LIFE_MS, A, BOTH, 10**6, 0)
    assert shares.share(100 + HALF_LIFE_MS, A, COST) == 1
    assert shares.share(0, B, COST) == 0, "nobody knows it"


def test_prompts_to_come_go_to_all_of_a_group_in_part() -> None:
    shares = group_of(A, B)
    shares.add(0, C, DECODE, 0, 0)
    shares.add(0, A, BOTH, 1_000, 0)
    assert shares.share(0, A, COST) == pytest.approx(ONE * (OWN_SHARE + (1 - OWN_SHARE) / 2))
    assert shares.share(0, B, COST) == pytest.approx(ONE * (1 - OWN_SHARE) / 2)
    assert shares.share(0, C, COST) == 0, "another role"


def test_who_leaves_a_group_takes_its_part_along() -> None:
    shares = group_of(A, B)
    shares.add(0, A, BOTH, 1_000, 0)
    shares.add(HALF_LIFE_MS, B, BOTH, 1_000, 0)
    shares.forget(A)
    assert shares.share(HALF_LIFE_MS, B, COST) == pytest.approx(ONE)
    assert shares.share(HALF_LIFE_MS, A, COST) == 0
    shares.add(HALF_LIFE_MS, B, DECODE, 1_000, 0)
    assert shares.share(HALF_LIFE_MS, B, COST) == 0, "what it did in another role"
    shares.forget(B)
    shares.forget(B)
    assert not shares._groups
    assert not shares._workers
