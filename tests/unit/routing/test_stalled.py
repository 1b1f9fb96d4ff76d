"""Workers whose step takes far too long: others get what comes, and later what is there."""

from dataclasses import replace

import pytest

from disagg.messages.registration import WorkerInfo
from disagg.messages.submit import Role
from tests.unit.routing.builders import STATS, Router, request, worker

P, P2 = worker("p", "prefill"), worker("p2", "prefill")
D, D2 = worker("d", "decode"), worker("d2", "decode")
PAIR = [("d", Role.DECODE), ("p", Role.PREFILL)]
STALLED = replace(STATS, stalled=True)


def plan(router: Router, name: str) -> list[tuple[str, Role]]:
    router.generate(request(name))
    return sorted((who, submit.role) for who, submit in router.submits)


@pytest.mark.parametrize(
    ("fleet", "stalled", "expected"),
    [
        ((P, P2, D, D2), (), PAIR),
        ((P, P2, D, D2), (P,), [("d", Role.DECODE), ("p2", Role.PREFILL)]),
        ((P, P2, D, D2), (D,), [("d2", Role.DECODE), ("p", Role.PREFILL)]),
        ((P, D, D2), (P,), [("d", Role.LOCAL)]),
        ((P, D), (D,), [("p", Role.LOCAL)]),
        ((P, D), (P, D), PAIR),
        ((D,), (D,), [("d", Role.LOCAL)]),
    ],
)
def test_others_are_given_what_comes(
    fleet: tuple[WorkerInfo, ...],
    stalled: tuple[WorkerInfo, ...],
    expected: list[tuple[str, Role]],
) -> None:
    router = Router(*fleet)
    for one in stalled:
        router.core.from_worker(0, one.incarnation, STALLED)
    assert plan(router, "r") == expected


def test_who_goes_on_is_chosen_again() -> None:
    router = Router(P, P2, D)
    router.core.from_worker(0, P.incarnation, STALLED)
    router.core.from_worker(0, P.incarnation, STATS)
    assert plan(router, "r") == PAIR


def test_who_alone_is_large_enough_is_chosen_all_the_same() -> None:
    router = Router(P, worker("d", "decode", max_model_tokens=12), D2)
    router.core.from_worker(0, D2.incarnation, STALLED)
    assert plan(router, "r") == [("p", Role.LOCAL)]
    router.core.from_worker(0, P.incarnation, STALLED)
    assert ("d2", Role.DECODE) in plan(router, "second")


def stalls(router: Router, who: WorkerInfo, at_ms: int) -> list[tuple[str, Role]]:
    """Tell the router that a worker has stalled, as its stats do over and over."""
    router.now_ms = at_ms
    router.did(router.core.from_worker(at_ms, who.incarnation, STALLED))
    return sorted((to, submit.role) for to, submit in router.submits)


@pytest.mark.parametrize("who", [P, D])
def test_what_it_has_goes_on_at_others_after_a_while(who: WorkerInfo) -> None:
    router = Router(P, P2, D, D2, worker_stalled_ms=50)
    assert plan(router, "r") == PAIR
    assert stalls(router, who, 10) == stalls(router, who, 59) == []
    found = stalls(router, who, 60)
    other = {"p": "p2", "d": "d2"}[who.incarnation.worker_id]
    assert len(found) == 2
    assert other in {to for to, _ in found}
    assert who.incarnation.worker_id not in {to for to, _ in found}
    assert {to for to, _ in router.cancels} == {"p", "d"}
    assert router.record("r").generations[0].cause == (
        f"worker_stalled: {who.incarnation.worker_id}: its step does not end"
    )


def test_who_goes_on_meanwhile_keeps_what_it_has() -> None:
    router = Router(P, P2, D, D2, worker_stalled_ms=50)
    plan(router, "r")
    stalls(router, D, 10)
    router.core.from_worker(40, D.incarnation, STATS)
    assert stalls(router, D, 60) == []
    assert stalls(router, D, 109) == []
    assert stalls(router, D, 110) != []


def test_tokens_of_the_stalled_one_come_too_late() -> None:
    router = Router(P, D, D2, worker_stalled_ms=50)
    plan(router, "r")
    (_, first), _ = router.submits
    router.tokens(P, first, 10, 7)
    stalls(router, D, 0)
    assert stalls(router, D, 50) == [("d2", Role.DECODE), ("p", Role.PREFILL)]
    (_, second), _ = router.submits
    router.tokens(D, first, 11, 8)
    assert router.delivered == []
    router.tokens(P, second, 11, 9)
    assert router.delivered == [9]


def test_nobody_else_can_do_it() -> None:
    router = Router(P, D, worker_stalled_ms=50)
    plan(router, "r")
    stalls(router, P, 0)
    stalls(router, D, 0)
    assert stalls(router, D, 1000) == []


def test_it_goes_on_elsewhere_once() -> None:
    """Where steps are slow everywhere it would use up its tries."""
    router = Router(P, D, D2, worker_stalled_ms=50)
    plan(router, "r")
    stalls(router, D, 0)
    assert stalls(router, D, 50) != []
    router.core.from_worker(50, D.incarnation, STATS)
    stalls(router, D2, 60)
    assert stalls(router, D2, 500) == []


def test_a_prefill_worker_whose_part_is_over_keeps_nobody_waiting() -> None:
    router = Router(P, D, D2, worker_stalled_ms=50)
    plan(router, "r")
    (_, submit), _ = router.submits
    router.tokens(P, submit, 10, 7)
    router.tokens(D, submit, 11, 8)  # so it has the KV
    stalls(router, P, 0)
    assert stalls(router, P, 50) == []
