"""An answer that lost its memory goes on where there is some to spare."""

import pytest

from disagg.messages.identity import RequestKey
from disagg.messages.registration import WorkerInfo
from disagg.messages.session import PrefillProgress
from disagg.messages.submit import Role, Submit
from tests.unit.routing.builders import Router
from tests.unit.routing.measured_fleet import D2, P2, D, P, fleet, roles, say, served

FULL = {"num_running": 8, "num_blocks_free": 0}


def decoding_at_d(*workers: WorkerInfo) -> tuple[Router, Submit]:
    """A request that has the first tokens of its answer from where it was handed over to."""
    router = fleet(*workers, policy="prefix_then_load")
    say(router, D2, num_running=1)
    submits = served(router)
    assert roles(submits) == {"p": Role.PREFILL, "d": Role.DECODE}
    router.tokens(P, submits["p"], 401, 7)
    router.tokens(D, submits["d"], 402, 8)
    assert router.delivered == [8]
    return router, submits["d"]


def preempted(router: Router, key: RequestKey, at: WorkerInfo = D) -> dict[str, Role]:
    """The worker says so; to whom the request is sent then."""
    say(router, at, **FULL)
    message = PrefillProgress(key, 0, preempted=True)
    router.did(router.core.from_worker(router.now_ms, at.incarnation, message))
    return roles(dict(router.submits))


def test_it_goes_on_where_there_is_memory() -> None:
    router, submit = decoding_at_d(P, D)
    assert preempted(router, submit.key) == {"p": Role.LOCAL}
    (again,) = dict(router.submits).values()
    assert again.token_ids[-2:] == (7, 8), "after the tokens that it has"
    assert "d" in {to for to, _ in router.cancels}
    router.tokens(D, submit, 403, 9)
    assert router.delivered == [], "what comes from there comes too late"
    router.tokens(P, again, 403, 9)
    assert router.delivered == [9]
    record = router.record("r")
    assert record.generations[0].cause == "preempted: d: no memory for its next token"
    assert "d has no memory for it" in record.generations[1].reason
    assert router.core.counters["replans", "preempted"] == 1


@pytest.mark.parametrize(
    "busy",
    [
        FULL,
        {"num_prefill_tokens_queued": 9_000, "num_waiting": 5},
        {"ready": False},
        {"stalled": True},
    ],
)
def test_it_stays_where_nobody_has_memory_or_time_for_it(busy: dict[str, int]) -> None:
    router, submit = decoding_at_d(P, D)
    say(router, P, **busy)
    assert preempted(router, submit.key) == {}
    assert router.cancels == []
    router.tokens(D, submit, 403, 9)
    assert router.delivered == [9]


def test_of_several_the_one_that_is_free_sooner_takes_it() -> None:
    router, submit = decoding_at_d(P, P2, D, D2)
    for busier in (P, D2):
        say(router, busier, num_running=8)
    assert preempted(router, submit.key) == {"p2": Role.LOCAL}


def test_it_goes_elsewhere_once_and_that_is_no_failure() -> None:
    router, submit = decoding_at_d(P, P2, D)
    assert preempted(router, submit.key) != {}
    ((name, again),) = router.submits
    there = {"p": P, "p2": P2}[name]
    assert preempted(router, again.key, there) == {}
    request = router.core._live.get("r")
    assert request is not None
    assert (len(request.generations), request.num_excused) == (2, 1)


def test_it_stays_where_nothing_was_measured() -> None:
    router = Router(P, D, policy="prefix_then_load", worker_silent_ms=10**6)
    submit = served(router)["d"]
    message = PrefillProgress(submit.key, 0, preempted=True)
    assert router.did(router.core.from_worker(0, D.incarnation, message)) == []


def test_what_the_prefill_worker_says_is_of_no_answer() -> None:
    router, submit = decoding_at_d(P, D, D2)
    assert preempted(router, submit.key, P) == {}
    assert preempted(router, submit.key) != {}, "control"
