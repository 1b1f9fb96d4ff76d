"""A reset of all prefix caches: who is told, who answers, and what may not happen meanwhile."""

from dataclasses import replace

import pytest

from disagg.errors import CapacityError, RemoteFault
from disagg.messages.registration import WorkerInfo
from disagg.messages.session import PrefixCacheReset, ResetPrefixCache
from disagg.routing.actions import CacheResetEnded, RouterAction, ToWorker, WorkerReset
from disagg.routing.cache_reset import ANSWERS_MS
from tests.unit.routing.builders import Router, request, worker

P, D = worker("p", "prefill"), worker("d", "decode")
PROMPT = tuple(range(100, 140))


def begin(router: Router) -> list[RouterAction]:
    return router.did(router.core.reset_prefix_caches(router.now_ms))


def answer(
    router: Router, who: WorkerInfo, number: int = 1, **fields: object
) -> list[CacheResetEnded]:
    message = replace(PrefixCacheReset(number, 7), **fields)  # type: ignore[arg-type]
    actions = router.core.from_worker(router.now_ms, who.incarnation, message)
    return [action for action in actions if isinstance(action, CacheResetEnded)]


def told(actions: list[RouterAction]) -> list[tuple[str, int]]:
    return [
        (action.worker.worker_id, action.message.number)
        for action in actions
        if isinstance(action, ToWorker) and isinstance(action.message, ResetPrefixCache)
    ]


def test_every_worker_is_told_and_the_last_answer_ends_it() -> None:
    router = Router(P, D)
    assert told(begin(router)) == [("d", 1), ("p", 1)]
    assert answer(router, P, in_use=(("sequence", 3),)) == []
    (ended,) = answer(router, D)
    assert ended.complete
    assert ended.workers == (
        WorkerReset(D.incarnation, 7),
        WorkerReset(P.incarnation, 7, (("sequence", 3),)),
    )
    assert router.core.counters["cache_resets", "complete"] == 1
    assert told(begin(router)) == [("d", 2), ("p", 2)]
    assert answer(router, P, 1) == answer(router, D, 1) == []  # late ones of the first
    assert not answer(router, P, 2)
    assert answer(router, D, 2)


def test_one_at_a_time_and_not_for_nobody() -> None:
    router = Router(P)
    begin(router)
    with pytest.raises(CapacityError):
        begin(router)
    with pytest.raises(RemoteFault, match="nothing was reset"):
        begin(Router())


@pytest.mark.parametrize("how", ["refused", "lost", "silent"])
def test_a_worker_that_did_not_is_named(how: str) -> None:
    router = Router(P, D, worker_silent_ms=10 * ANSWERS_MS)
    begin(router)
    assert answer(router, D) == []
    actions: list[RouterAction] = []
    if how == "refused":
        actions += answer(router, P, refused="no cache")
    elif how == "lost":
        actions += router.lost(P)
    else:
        assert router.core.tick(ANSWERS_MS - 1) == []
        actions += router.core.tick(ANSWERS_MS)
    (ended,) = [action for action in actions if isinstance(action, CacheResetEnded)]
    assert not ended.complete
    said = {one.worker: one.error for one in ended.workers}
    assert said.pop(D.incarnation) == ""
    expected = {
        "refused": "no cache",
        "lost": "was lost: session_ended",
        "silent": f"has not answered within {ANSWERS_MS} ms",
    }
    assert said == {P.incarnation: expected[how]}
    assert router.core.counters["cache_resets", "incomplete"] == 1
    begin(router)  # the next one may be tried


def test_who_was_away_is_reset_before_anything_else_is_sent() -> None:
    router = Router(P, D)
    router.lost(P)
    router.core.register(0, P)  # registered, its session is not open
    assert told(begin(router)) == [("d", 1)]
    (ended,) = answer(router, D)
    assert [one.error for one in ended.workers if one.worker == P.incarnation] == [
        "has no session now; it is reset before the next request reaches it"
    ]
    actions = router.core.session_up(0, P.incarnation)
    assert told(actions) == [("p", 1)]
    assert answer(router, P) == []
    router.lost(P)
    router.core.register(0, P)
    assert told(router.core.session_up(0, P.incarnation)) == []  # it has got the last one
    assert told(Router(P).core.session_up(0, P.incarnation)) == []  # there was none


def test_no_prefix_is_pulled_while_some_worker_may_still_have_it() -> None:
    router = Router(P, D, pull_tokens_min=16)
    router.holds(D, PROMPT)

    def pulls(name: str) -> bool:
        router.generate(request(name, num_tokens=41))
        (pull,) = [submit.pull for who, submit in router.submits if who == "p"]
        router.did(router.core.cancel(0, name, "seen"))
        return pull is not None

    assert pulls("before")
    begin(router)
    assert answer(router, P) == []
    assert not pulls("meanwhile")
    assert answer(router, D)
    assert pulls("after")  # by an index that has not heard yet; at the worker it finds nothing


def test_no_prefix_is_pulled_of_a_worker_that_was_away_during_the_last_reset() -> None:
    router = Router(P, D, pull_tokens_min=16)
    router.lost(D)
    begin(router)
    assert answer(router, P)
    router.join(D)  # ready, its answer is on its way
    router.holds(D, PROMPT)
    router.generate(request("early", num_tokens=41))
    assert [submit.pull for who, submit in router.submits if who == "p"] == [None]
    router.did(router.core.cancel(0, "early", "seen"))
    assert answer(router, D) == []
    router.generate(request("late", num_tokens=41))
    (pull,) = [submit.pull for who, submit in router.submits if who == "p"]
    assert pull is not None
