"""Long prompts are expected where they were, short ones at all of a kind; both fade with time."""

from dataclasses import replace
from math import log

import pytest

from disagg.messages.registration import WorkerInfo
from disagg.routing.estimates.by_worker import ByWorker
from disagg.routing.estimates.estimate import Estimate, Work, estimate
from disagg.routing.estimates.place import LongPrompts, Place, StepCost
from disagg.routing.estimates.prompt_shares import (
    SHARE_HALF_LIFE_MS,
    WAITING_MAX,
    PromptShares,
)
from tests.unit.routing.builders import worker

COST = StepCost(step_ms=1.0, token_ms=1.0, context_token_ms=0.5, decode_ms=0.0, decode_context_ms=0)
FULL_TOKENS = SHARE_HALF_LIFE_MS / log(2)
"""That fill all of the time that counts."""
A, B, C = (worker(name, "both") for name in "abc")


def prompt(stall_share: float, prefill_ms: float = 10.0) -> Estimate:
    idle = Place(COST, 0, 0.0, 0, 0, 0, 0, 0)
    found = estimate(Work(10, 0, 10), idle, idle)
    return replace(found, stall_share=stall_share, prefill_ms=prefill_ms)


def known(*workers: WorkerInfo) -> PromptShares:
    shares = PromptShares()
    for one in workers:
        shares.computed(0, one, 1e9, 0.0)
    return shares


def test_the_first_figures_of_a_life_say_not_when_it_was() -> None:
    assert known(A).share(0, A, COST) == 0
    assert PromptShares().share(0, A, COST) == 0, "nobody has told of it"


def test_long_prompts_stay_short_ones_are_everybodys() -> None:
    for stall_share, there, elsewhere in ((1.0, 0.6, 0.0), (0.0, 0.3, 0.3), (0.5, 0.45, 0.15)):
        shares = known(A, B)
        shares.planned(A.incarnation, prompt(stall_share))
        shares.computed(1_000, A, 0.6 * FULL_TOKENS, 0.0)
        assert shares.share(1_000, A, COST) == pytest.approx(there)
        assert shares.share(1_000, B, COST) == pytest.approx(elsewhere)
    shares = known(A, B)
    shares.computed(1_000, A, 0.6 * FULL_TOKENS, 0.0)
    assert shares.share(1_000, B, COST) == 0, "nothing was planned by this router: taken as long"


def test_a_prompt_counts_by_its_time() -> None:
    shares = known(A, B)
    for _ in range(3):
        shares.planned(A.incarnation, prompt(0.0, prefill_ms=1.0))
    shares.planned(A.incarnation, prompt(1.0, prefill_ms=1_000.0))
    shares.planned(C.incarnation, prompt(0.0, prefill_ms=1e9))
    shares.computed(0, A, 0.6 * FULL_TOKENS, 0.0)
    assert shares.share(0, B, COST) < 0.01
    for _ in range(100):
        shares.planned(A.incarnation, prompt(0.0))
    shares.computed(0, A, 0.6 * FULL_TOKENS, 0.0)
    assert shares.share(0, B, COST) == pytest.approx(0.3, rel=0.05), "older ones are forgotten"


def test_long_prompts_are_known_by_their_share_and_time() -> None:
    shares = known(A, B)
    assert shares.long_prompts(0, A, COST) == LongPrompts(0, 0)
    for stall_share, prefill_ms in ((1.0, 1_000.0), (0.0, 20.0), (1.0, 500.0)):
        shares.planned(A.incarnation, prompt(stall_share, prefill_ms))
    shares.computed(1_000, A, 0.6 * FULL_TOKENS, 0.0)
    found = shares.long_prompts(1_000, A, COST)
    assert 500 < found.each_ms < 1_000, "the short one is none of them"
    assert found.share == pytest.approx(0.6, rel=0.03), "it took hardly any of the time"
    assert shares.long_prompts(1_000, B, COST).share == 0
    assert shares.long_prompts(1_000, C, COST) == LongPrompts(0, 0), "nobody has told of it"
    shares.planned(B.incarnation, prompt(0.0))
    assert shares.long_prompts(1_000, B, COST).each_ms == 0, "it has had none"


def test_prompts_that_wait_for_a_worker_are_to_come_there() -> None:
    shares, waiting = known(A, B), ByWorker[Estimate]()

    def at(worker: WorkerInfo) -> LongPrompts:
        return shares.long_prompts(0, worker, COST, waiting.at(worker.incarnation))

    waiting.put(A.incarnation, "long", prompt(1.0, 800.0))
    waiting.put(A.incarnation, "half", prompt(0.5, 100.0))
    assert at(A) == LongPrompts(0, 0, 1.0, 850.0)
    assert at(B) == LongPrompts(0, 0)
    waiting.put(B.incarnation, "long", prompt(1.0, 800.0))
    assert at(A) == LongPrompts(0, 0, 0.5, 50.0), "it has another plan"
    assert at(B) == LongPrompts(0, 0, 1.0, 800.0)
    for _ in range(2):
        waiting.drop("long")
        waiting.drop("half")
    for one in (A, B):
        assert at(one) == LongPrompts(0, 0)


def test_of_many_that_wait_a_few_are_looked_at() -> None:
    waiting = [prompt(1.0, 10.0)] * 10 * WAITING_MAX
    found = known(A).long_prompts(0, A, COST, waiting)
    assert found == LongPrompts(0, 0, 1.0, WAITING_MAX * 10.0)


def test_all_of_it_fades_and_time_goes_not_back() -> None:
    shares = known(A, B)
    shares.planned(A.incarnation, prompt(0.5))
    shares.computed(1_000, A, 0.0, 0.4 * FULL_TOKENS)
    before = [shares.share(1_000, one, COST) for one in (A, B)]
    assert before == pytest.approx([0.15, 0.05])
    later = [shares.share(1_000 + SHARE_HALF_LIFE_MS, one, COST) for one in (A, B)]
    assert later == pytest.approx([one / 2 for one in before])
    assert [shares.share(1_000, one, COST) for one in (A, B)] == pytest.approx(later)


def test_no_share_is_more_than_all() -> None:
    shares = known(A)
    shares.computed(0, A, 10 * FULL_TOKENS, 0.0)
    assert shares.share(0, A, COST) == 1


def test_other_roles_and_revisions_have_their_own() -> None:
    prefill, other = worker("p", "prefill"), replace(worker("o", "both"), revision="other")
    shares = known(A, prefill, other)
    for one in (prefill, other):
        shares.planned(one.incarnation, prompt(0.0))
        shares.computed(0, one, FULL_TOKENS, 0.0)
        assert shares.share(0, one, COST) == pytest.approx(1)
    assert shares.share(0, A, COST) == 0


def test_workers_change_roles_and_leave() -> None:
    shares = known(A, B)
    shares.planned(A.incarnation, prompt(0.0))
    shares.computed(0, A, 0.6 * FULL_TOKENS, 0.0)
    assert shares.share(0, B, COST) == pytest.approx(0.3)
    moved = replace(A, role="decode")
    shares.computed(0, moved, 0.2 * FULL_TOKENS, 0.0)
    assert shares.share(0, moved, COST) == pytest.approx(0.2), "in its new role"
    assert shares.share(0, B, COST) == pytest.approx(0.6), "its old one has what was computed in it"
    for one in (A, B):
        shares.forget(one.incarnation)
        shares.forget(one.incarnation)
        assert shares.share(0, one, COST) == 0
    shares.computed(0, B, 1e9, 0.0)
    assert shares.share(0, B, COST) == 0, "nothing is left of it"
