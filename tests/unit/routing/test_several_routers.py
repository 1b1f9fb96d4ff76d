"""What a router does because there are others: ids of its own, claims, resets, workers that end."""

from dataclasses import replace

import pytest

from disagg.errors import SupersededError
from disagg.messages.registration import WorkerInfo
from disagg.messages.session import (
    Claim,
    EndReason,
    PrefixCacheReset,
    ResetPrefixCache,
    Superseded,
)
from disagg.routing.actions import NewRequest, RouterAction, ToWorker
from tests.unit.routing.builders import STATS, Router, request, worker

P, D, S = worker("p", "prefill"), worker("d", "decode"), worker("s", "both")
NAME = b"n" * 16
PROMPT = tuple(range(100, 140))


def named(name: str = "r") -> NewRequest:
    return replace(request(name), claim=NAME)


def claims(router: Router) -> list[tuple[str, Claim]]:
    return [
        (action.worker.worker_id, action.message)
        for action in router.actions
        if isinstance(action, ToWorker) and isinstance(action.message, Claim)
    ]


def heard(router: Router, who: WorkerInfo, message: object) -> list[RouterAction]:
    return router.did(router.core.from_worker(router.now_ms, who.incarnation, message))  # type: ignore[arg-type]


def test_every_key_has_the_routers_id() -> None:
    router = Router(P, D, router_id="a:1")
    router.generate()
    assert {submit.key.router for _, submit in router.submits} == {"a:1"}
    plain = Router(P, D)
    plain.generate()
    assert {submit.key.router for _, submit in plain.submits} == {""}


def test_a_name_is_claimed_where_it_is_served_before_that_and_at_one_worker_of_all() -> None:
    workers = [P, D, *(worker(f"w{n}", "both") for n in range(8))]
    routers = [Router(*order, router_id="x:1") for order in (workers, workers[::-1])]
    keepers = []
    for router in routers:
        router.generate(named())
        where = [name for name, _ in claims(router)]
        assert len(where) == len(set(where)) <= 3
        assert {name for name, _ in router.submits} <= set(where)
        first = [type(action.message) for action in router.actions if isinstance(action, ToWorker)]
        assert first[: len(where)] == [Claim] * len(where), "before the submits"
        keeper = router.core._fleet.keepers.of(NAME)
        assert keeper is not None
        keepers.append(keeper)
        assert keeper.worker_id in where
    assert keepers[0] == keepers[1], "whoever asks"


def test_a_claim_says_when_it_was_accepted_and_whether_it_is_planned_anew() -> None:
    router = Router(P, D, S)
    router.now_ms = 70
    router.generate(named())
    assert {(claim.accepted_ms, claim.again) for _, claim in claims(router)} == {(70, False)}
    assert {claim.waited_ms for _, claim in claims(router)} == {0}
    router.now_ms = 90
    router.ended(D, router.submits[0][1], EndReason.STEP_FAILED)
    assert {(claim.accepted_ms, claim.again) for _, claim in claims(router)} == {(70, True)}
    router.generate(replace(named("choice"), accepted_ms=60))
    assert {claim.accepted_ms for _, claim in claims(router)} == {60}, "with others of its group"
    assert {claim.waited_ms for _, claim in claims(router)} == {30}, "until it is planned"


def test_a_request_without_a_name_claims_nothing() -> None:
    router = Router(P, D)
    router.generate()
    assert claims(router) == []


def test_who_is_superseded_fails_and_is_cancelled_once() -> None:
    router = Router(P, D)
    router.generate(named())
    key = router.submits[0][1].key
    heard(router, P, Superseded(key._replace(request_id="unknown")))
    assert router.actions == []
    heard(router, P, Superseded(key._replace(generation=0)))
    assert router.actions == [], "of an earlier request with this id"
    heard(router, P, Superseded(key))
    assert isinstance(router.error, SupersededError)
    assert sorted(name for name, _ in router.cancels) == ["d", "p"]
    assert router.core.num_live == 0
    heard(router, D, Superseded(key))
    assert router.actions == []


def test_a_worker_that_was_not_asked_supersedes_nothing() -> None:
    workers = [P, D, *(worker(f"w{n}", "both") for n in range(8))]
    router = Router(*workers)
    router.generate(named())
    key = router.submits[0][1].key
    asked = {name for name, _ in claims(router)}
    stranger, *_ = (one for one in workers if one.incarnation.worker_id not in asked)
    heard(router, stranger, Superseded(key))
    assert router.actions == []
    assert router.core.num_live == 1


def test_it_is_ended_also_after_it_was_planned_anew_and_a_later_one_is_not() -> None:
    router = Router(P, D, S)
    router.generate(named())
    key = router.submits[0][1].key
    router.ended(D, router.submits[0][1], EndReason.STEP_FAILED)
    assert router.submits, "planned anew"
    heard(router, P, Superseded(key))
    assert isinstance(router.error, SupersededError)
    router.generate(named())
    heard(router, P, Superseded(key))
    assert router.actions == [], "of the earlier request with this id"
    assert router.core.num_live == 1


def test_what_a_client_sends_again_here_ends_the_first() -> None:
    router = Router(P, D)
    router.generate(named())
    router.did(router.core.replace(0, "r"))
    assert isinstance(router.error, SupersededError)
    router.generate(named())
    assert router.core.num_live == 1


# -- workers that end ---------------------------------------------------------------------------


def draining(router: Router, who: WorkerInfo) -> None:
    heard(router, who, replace(STATS, ready=False, draining=True))


def test_nothing_is_planned_on_a_worker_that_drains() -> None:
    router = Router(P, D, S)
    draining(router, D)
    for n in range(4):
        router.generate(request(f"r{n}"))
        assert "d" not in {name for name, _ in router.submits}
        assert router.submits


@pytest.mark.parametrize(
    ("reason", "survives"), [(EndReason.DRAINING, True), (EndReason.STEP_FAILED, False)]
)
def test_workers_that_drain_use_up_no_tries(reason: EndReason, survives: bool) -> None:
    """The control: another reason does."""
    workers = [worker(f"w{n}", "both") for n in range(8)]
    router = Router(*workers, replans_max=2)
    router.generate(request("r"))
    for _ in range(4):
        name, submit = router.submits[0]
        (who,) = [one for one in workers if one.incarnation.worker_id == name]
        draining(router, who)
        router.ended(who, submit, reason)
        if not router.submits:
            break
    assert bool(router.core.num_live) == survives


# -- resets -------------------------------------------------------------------------------------


def told(actions: list[RouterAction]) -> list[tuple[str, ResetPrefixCache]]:
    return [
        (action.worker.worker_id, action.message)
        for action in actions
        if isinstance(action, ToWorker) and isinstance(action.message, ResetPrefixCache)
    ]


def pulls(router: Router, name: str) -> bool:
    router.generate(request(name, num_tokens=41))
    (pull,) = [submit.pull for who, submit in router.submits if who == "p"]
    router.did(router.core.cancel(0, name, "seen"))
    return pull is not None


def test_another_routers_reset_is_sent_on_and_nothing_is_pulled_before_it_is_done() -> None:
    router = Router(P, D, router_id="b:1", pull_tokens_min=16)
    router.holds(D, PROMPT)
    assert pulls(router, "before")
    theirs = PrefixCacheReset(4, 7, router="a:1")
    order = ResetPrefixCache(4, "a:1")
    assert told(heard(router, P, theirs)) == [("d", order), ("p", order)]
    assert not pulls(router, "meanwhile")
    assert told(heard(router, P, theirs)) == [], "it is known by now"
    assert not pulls(router, "one of two")
    assert told(heard(router, D, theirs)) == []
    assert pulls(router, "after")
    assert told(heard(router, D, replace(theirs, number=3))) == [], "a late one"


def test_who_was_away_gets_the_resets_of_all_routers() -> None:
    router = Router(P, D, router_id="b:1")
    router.lost(D)
    heard(router, P, PrefixCacheReset(4, 7, router="a:1"))
    router.did(router.core.reset_prefix_caches(0))
    router.core.register(0, D)
    orders = [order for _, order in told(router.core.session_up(0, D.incarnation))]
    assert orders == [ResetPrefixCache(4, "a:1"), ResetPrefixCache(1, "b:1")]


def test_its_own_answers_are_no_new_resets() -> None:
    router = Router(P, D, router_id="b:1")
    router.did(router.core.reset_prefix_caches(0))
    for who in (P, D):
        assert told(heard(router, who, PrefixCacheReset(1, 7, router="b:1"))) == []
