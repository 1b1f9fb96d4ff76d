"""Workers whose step takes far too long get nothing new while another one can do it."""

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
