"""Shares of workers' time: each one's own and its kind's, which fade, follow roles and forget."""

import random
from dataclasses import replace

import pytest

from disagg.messages.identity import Incarnation
from disagg.messages.registration import WorkerInfo
from disagg.routing.estimates.place import StepCost
from disagg.routing.estimates.prompt_shares import SHARE_HALF_LIFE_MS, PromptShares
from tests.unit.routing.builders import worker

COST = StepCost(step_ms=1.0, token_ms=1.0, context_token_ms=0.0, decode_ms=0.0, decode_context_ms=0)
FULL_TOKENS = SHARE_HALF_LIFE_MS / 0.6931471805599453
"""That fill all of the time that counts."""
A, B, C = (worker(name, "both") for name in "abc")


def known(*workers: WorkerInfo) -> PromptShares:
    shares = PromptShares()
    for one in workers:
        shares.computed(0, one, 1e9, 0.0)
    return shares


def test_the_first_figures_of_a_life_say_not_when_it_was() -> None:
    assert known(A).shares(0, A, COST) == (0.0, 0.0)
    assert PromptShares().shares(0, A, COST) == (0.0, 0.0), "nobody has told of it"


def test_own_and_average_share_fade() -> None:
    shares = known(A, B)
    shares.computed(1_000, A, FULL_TOKENS / 2, 0.0)
    assert shares.shares(1_000, A, COST) == pytest.approx((0.5, 0.25))
    assert shares.shares(1_000, B, COST) == pytest.approx((0.0, 0.25))
    later_ms = 1_000 + SHARE_HALF_LIFE_MS
    assert shares.shares(later_ms, A, COST) == pytest.approx((0.25, 0.125))
    assert shares.shares(1_000, A, COST) == pytest.approx((0.25, 0.125)), "time goes not back"


def test_no_share_is_more_than_all() -> None:
    shares = known(A)
    shares.computed(0, A, 10 * FULL_TOKENS, 0.0)
    assert shares.shares(0, A, COST) == (1.0, 1.0)


def test_other_roles_and_revisions_are_averaged_alone() -> None:
    prefill, other = worker("p", "prefill"), replace(worker("o", "both"), revision="other")
    shares = known(A, prefill, other)
    shares.computed(0, prefill, FULL_TOKENS, 0.0)
    shares.computed(0, other, FULL_TOKENS, 0.0)
    assert shares.shares(0, A, COST) == (0.0, 0.0)
    assert shares.shares(0, prefill, COST) == pytest.approx((1.0, 1.0)), "control"


def test_who_leaves_takes_its_share_along_and_who_changes_roles_too() -> None:
    shares = known(A, B, C)
    shares.computed(0, A, 0.6 * FULL_TOKENS, 0.0)
    assert shares.shares(0, B, COST)[1] == pytest.approx(0.2)
    shares.forget(A.incarnation)
    assert shares.shares(0, B, COST) == pytest.approx((0.0, 0.0))
    shares.computed(0, B, 0.6 * FULL_TOKENS, 0.0)
    moved = replace(B, role="decode")
    shares.computed(SHARE_HALF_LIFE_MS, moved, 0.0, 0.0)
    assert shares.shares(SHARE_HALF_LIFE_MS, C, COST) == pytest.approx((0.0, 0.0))
    assert shares.shares(SHARE_HALF_LIFE_MS, moved, COST) == pytest.approx((0.3, 0.3))
    for one in (B, C):
        shares.forget(one.incarnation)
        shares.forget(one.incarnation)
    assert shares.shares(0, C, COST) == (0.0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_averages_are_those_of_the_workers_that_are_there(seed: int) -> None:
    rng = random.Random(seed)
    shares, now_ms = PromptShares(), 0
    there: dict[Incarnation, WorkerInfo] = {}
    for _ in range(200):
        now_ms += rng.randrange(0, 2_000)
        one = replace(rng.choice((A, B, C)), role=rng.choice(("both", "decode")))
        if rng.random() < 0.1:
            shares.forget(one.incarnation)
            there.pop(one.incarnation, None)
            continue
        shares.computed(now_ms, one, rng.random() * 500, 0.0)
        there[one.incarnation] = one
        for info in there.values():
            same = [each for each in there.values() if each.role == info.role]
            own = [shares.shares(now_ms, each, COST)[0] for each in same]
            mean = shares.shares(now_ms, info, COST)[1]
            assert mean == pytest.approx(sum(own) / len(own), abs=1e-6)
