"""What the router does when a part ends, a worker is lost, or all tries are used up."""

from dataclasses import replace
from typing import Any

import pytest

from disagg.errors import CapacityError, RemoteFault, RequestError
from disagg.messages.outputs import FinishReason
from disagg.messages.registration import WorkerInfo
from disagg.messages.session import EndReason, PrefillReport, Role, Submit
from disagg.routing.actions import NewRequest
from tests.unit.routing.builders import CONTRACT, STATS, Router, hashes_of, request, worker

P, D, D2, B = (
    worker("p", "prefill"),
    worker("d", "decode"),
    worker("d2", "decode"),
    worker("b"),
)


def started(
    *workers: WorkerInfo, new: NewRequest | None = None, **limits: Any
) -> tuple[Router, Submit]:
    """A router with one request; its submit at the decode (or local) worker."""
    router = Router(*workers, **limits)
    router.generate(new)
    return router, router.submits[0][1]


def test_replan_goes_on_after_the_accepted_tokens_with_the_same_sampling() -> None:
    router, submit = started(P, D)
    router.tokens(P, submit, 10, 1)
    router.tokens(D, submit, 11, 2, 3)
    router.ended(D, submit, EndReason.STEP_FAILED)
    assert sorted(router.cancels) == [("d", 1), ("p", 1)]
    ((who, again),) = router.submits
    assert (who, again.role) == ("p", Role.LOCAL)
    assert again.key.generation == 2
    assert again.token_ids == (*request().token_ids, 1, 2, 3)
    assert again.hashes == hashes_of(again.token_ids)
    assert again.sampling == replace(submit.sampling, max_tokens=2)
    router.tokens(P, again, 13, 4, 5, finish=FinishReason.LENGTH)
    assert (router.delivered, router.finish) == ([4, 5], [FinishReason.LENGTH])
    first, second = router.record("r").generations
    assert (first.cause, second.cause) == ("step_failed: because", "")
    assert (first.num_tokens, second.num_tokens) == (3, 2)


def test_messages_of_an_old_generation_change_nothing() -> None:
    router, submit = started(P, D)
    router.ended(P, submit, EndReason.LEASE_DEAD)
    before = router.record("r")
    assert router.tokens(P, submit, 10, 1) == []
    assert router.ended(D, submit, EndReason.PEER_ENDED) == []
    assert router.pulled(D, P, submit) == []
    assert router.record("r") == before


def test_a_worker_without_a_part_is_not_believed() -> None:
    router, submit = started(P, D, D2)
    assert router.tokens(D2, submit, 10, 1) == []
    assert router.ended(D2, submit, EndReason.STEP_FAILED) == []


@pytest.mark.parametrize(
    ("sender", "reason", "expected"),
    [
        (D, EndReason.READ_FAILED, [("d", Role.LOCAL)]),
        (D, EndReason.READ_STUCK, [("d", Role.LOCAL)]),
        (D, EndReason.COMMIT_REFUSED, [("d", Role.LOCAL)]),
        (P, EndReason.LEASE_DEAD, [("d", Role.LOCAL)]),
        (D, EndReason.EXPIRED, [("d", Role.LOCAL)]),  # its bound ended it, not its fault
        (D, EndReason.PEER_LOST, [("d", Role.LOCAL)]),
        (P, EndReason.PEER_LOST, [("p", Role.LOCAL)]),
        (P, EndReason.PEER_ENDED, [("p", Role.LOCAL)]),
        (P, EndReason.RESERVE_REFUSED, [("d2", Role.DECODE), ("p", Role.PREFILL)]),
        (D, EndReason.CAPACITY, [("d2", Role.DECODE), ("p", Role.PREFILL)]),
        (P, EndReason.CAPACITY, [("d2", Role.LOCAL)]),
        (D, EndReason.STEP_FAILED, [("d2", Role.DECODE), ("p", Role.PREFILL)]),
    ],
)
def test_the_next_plan_avoids_what_failed(
    sender: WorkerInfo, reason: EndReason, expected: list[tuple[str, Role]]
) -> None:
    router, submit = started(P, D, D2)
    router.ended(sender, submit, reason)
    assert [(who, again.role) for who, again in router.submits] == expected
    assert router.core.counters["replans", reason.value] == 1


def test_without_another_decode_worker_it_is_decoded_where_it_is_prefilled() -> None:
    router, submit = started(P, D)
    router.ended(P, submit, EndReason.RESERVE_REFUSED)
    assert [(who, again.role) for who, again in router.submits] == [("p", Role.LOCAL)]


def test_a_pair_that_failed_to_transfer_rests_for_other_requests_too() -> None:
    router, submit = started(P, D, D2)
    router.ended(D, submit, EndReason.READ_STUCK)
    for info in (P, D, D2):
        router.join(info)  # new stats: nobody is loaded
    router.generate(request("r2"))
    assert router.submits[0][0] == "d2"
    router.now_ms = 101  # rested: probed again
    for info in (P, D, D2):
        router.join(info)
    router.generate(request("r3"))
    assert router.submits[0][0] == "d"


def test_replans_are_bounded() -> None:
    workers = {"b": B, "c": worker("c")}
    router, _ = started(*workers.values(), replans_max=2)
    for _ in range(3):
        who, submit = router.submits[0]
        router.ended(workers[who], submit, EndReason.STEP_FAILED)
    assert isinstance(router.error, RemoteFault)
    assert len(router.record("r").generations) == 3
    assert router.core.num_live == 0


def test_no_room_anywhere_is_said_as_capacity() -> None:
    router, submit = started(B, replans_max=0)
    router.ended(B, submit, EndReason.CAPACITY)
    assert isinstance(router.error, CapacityError)
    router, submit = started(B, replans_max=0)
    router.tokens(B, submit, 10, 1)
    router.ended(B, submit, EndReason.CAPACITY)  # tokens are out: no 429 any more
    assert isinstance(router.error, RemoteFault)


def test_rejected_by_the_largest_is_the_callers_error() -> None:
    router, submit = started(P, D)
    router.ended(D, submit, EndReason.REJECTED)
    assert isinstance(router.error, RequestError)
    assert router.error.message == "no larger worker is ready: rejected: because"
    assert router.error.request_id == "r"
    assert sorted(router.cancels) == [("d", 1), ("p", 1)]
    assert router.submits == []


def test_what_outgrew_a_worker_goes_on_at_a_larger_one() -> None:
    large, larger = worker("e", max_model_tokens=1001), worker("f", max_model_tokens=1002)
    everybody = {"b": B, "e": large, "f": larger}
    router, submit = started(*everybody.values(), new=request(num_tokens=600))
    router.tokens(B, submit, 600, 1)
    router.ended(B, submit, EndReason.REJECTED)
    for name in ("e", "f"):
        ((who, submit),) = router.submits
        assert (who, submit.token_ids[-1]) == (name, 1)
        router.ended(everybody[who], submit, EndReason.REJECTED)
    # It was accepted and tokens are out: no mistake of the client's any more.
    assert isinstance(router.error, RemoteFault)
    assert router.core.counters["replans", "rejected"] == 3


def test_who_rejected_it_does_not_prefill_it_either() -> None:
    router, submit = started(P, worker("d", "decode", max_model_tokens=1001))
    router.ended(P, submit, EndReason.REJECTED)
    assert [(who, again.role) for who, again in router.submits] == [("d", Role.LOCAL)]


def test_a_hand_over_that_failed_is_not_tried_again_where_local_is_not_possible() -> None:
    small = worker("p", "prefill", max_model_tokens=14)
    router, submit = started(small, D, D2)
    router.core.from_worker(0, D2.incarnation, replace(STATS, num_running=9))
    router.ended(small, submit, EndReason.PEER_ENDED)  # it cannot serve the request alone
    assert [who for who, _ in router.submits] == ["d2", "p"]


def test_who_failed_is_not_chosen_to_serve_alone() -> None:
    router = Router(P, D)
    router.holds(P, request().token_ids)
    router.generate()
    for sender, reason in (
        (D, EndReason.STEP_FAILED),
        (P, EndReason.STEP_FAILED),
        (D, EndReason.READ_FAILED),
    ):
        router.ended(sender, router.submits[0][1], reason)
    assert [(who, again.role) for who, again in router.submits] == [("p", Role.LOCAL)]


def test_rejections_count_against_the_bound_of_plans() -> None:
    router, submit = started(B, worker("e", max_model_tokens=1001), replans_max=0)
    router.ended(B, submit, EndReason.REJECTED)
    assert router.submits == []
    assert isinstance(router.error, RequestError)


def test_a_request_whose_only_large_worker_is_lost_is_no_mistake_of_the_clients() -> None:
    router, submit = started(worker("e", max_model_tokens=1001), B, new=request(max_tokens=991))
    assert submit.role is Role.DECODE
    router.lost(worker("e"))
    assert isinstance(router.error, RemoteFault)
    assert "need 1001 tokens" in router.error.message


def test_who_let_a_hand_over_expire_serves_the_next_request_like_any_other() -> None:
    router, submit = started(P, D)
    router.ended(D, submit, EndReason.EXPIRED)
    router.generate(request("r2"))
    assert [(who, again.role) for who, again in router.submits] == [
        ("d", Role.DECODE),
        ("p", Role.PREFILL),
    ]


def test_an_end_of_the_prefill_part_after_the_pull_changes_nothing() -> None:
    router, submit = started(P, D)
    router.pulled(D, P, submit)
    assert router.ended(P, submit, EndReason.EXPIRED) == []
    assert router.ended(D, submit, EndReason.STEP_FAILED) != []  # control: the decode part does


def test_lost_prefill_worker_before_the_pull_plans_anew() -> None:
    router, submit = started(P, D)
    router.tokens(P, submit, 10, 1)
    router.lost(P)
    assert router.cancels == [("d", 1)]
    assert [(who, s.role, s.token_ids[-1]) for who, s in router.submits] == [("d", Role.LOCAL, 1)]


@pytest.mark.parametrize("sign", ["report", "tokens"])
def test_lost_prefill_worker_after_the_pull_is_not_needed(sign: str) -> None:
    router, submit = started(P, D)
    router.tokens(P, submit, 10, 1)
    if sign == "report":
        router.pulled(D, P, submit)
    else:
        router.tokens(D, submit, 11, 2)
    router.lost(P)
    assert (router.submits, router.cancels) == ([], [])
    router.tokens(D, submit, 11, 2, 3)
    assert router.delivered[-1] == 3


def test_token_zero_lost_with_its_worker_is_computed_again() -> None:
    router, submit = started(P, D)
    router.tokens(D, submit, 11, 2)
    router.lost(P)
    assert [s.token_ids for _, s in router.submits] == [request().token_ids]


def test_lost_decode_worker_goes_on_elsewhere() -> None:
    router, submit = started(P, D, D2)
    router.tokens(P, submit, 10, 1)
    router.lost(D)
    assert router.cancels == [("p", 1)]
    assert [(who, s.role) for who, s in router.submits] == [
        ("d2", Role.DECODE),
        ("p", Role.PREFILL),
    ]


def test_a_request_that_loses_two_workers_is_poison() -> None:
    router, _ = started(B, worker("c"), worker("e"), new=request(num_tokens=600))
    first = router.submits[0][0]
    router.lost(worker(first))
    second = router.submits[0][0]
    router.lost(worker(second))
    assert isinstance(router.error, RemoteFault)
    assert first in str(router.error)
    assert second in str(router.error)
    assert router.submits == []


def test_a_new_epoch_is_a_loss() -> None:
    router, _ = started(P, D, D2)
    router.did(router.core.register(0, worker("d", "decode", epoch="e2")))
    assert router.disconnected == [D.incarnation]
    assert [who for who, _ in router.submits] == ["d2", "p"]


# --- another decode worker takes the lease over


def sealed(router: Router) -> tuple[Submit, Submit]:
    """A hand-over from p to d1 whose prefill is over; the submits of d1 and p."""
    router.generate()
    (_, to_decode), (_, to_prefill) = router.submits
    report = PrefillReport(to_prefill.key, 10, 0, 10)
    router.core.from_worker(0, worker("p").incarnation, report)
    router.tokens(worker("p", "prefill"), to_prefill, 10, 7)
    return to_decode, to_prefill


def trio() -> Router:
    return Router(worker("p", "prefill"), worker("d1", "decode"), worker("d2", "decode"))


def test_a_lost_decode_worker_is_replaced_at_the_lease() -> None:
    router = trio()
    _, to_prefill = sealed(router)
    router.lost(worker("d1"))
    ((name, submit),) = router.submits
    assert name == "d2"
    assert (submit.role, submit.take_over) == (Role.DECODE, to_prefill.key)
    assert submit.token_ids[-1] == 7
    assert submit.peer is not None
    assert submit.peer.incarnation == worker("p").incarnation
    assert router.cancels == [], "the prefill worker keeps the lease"
    assert router.core.counters["plans", "take_over"] == 1
    router.pulled(worker("d2"), worker("p"), submit)
    router.tokens(worker("d2"), submit, 11, 8, 9, 10, 11, finish=FinishReason.LENGTH)
    assert router.delivered == [8, 9, 10, 11]
    assert router.finish == [FinishReason.LENGTH]


def test_a_lost_link_counts_as_a_lost_decode_worker() -> None:
    router = trio()
    to_decode, _ = sealed(router)
    router.ended(worker("d1"), to_decode, EndReason.PEER_LOST)
    ((name, submit),) = router.submits
    assert (name, submit.take_over) == ("d2", to_decode.key)
    assert router.cancels == [("d1", to_decode.key.generation)]


def test_a_refused_take_over_is_planned_anew_and_both_keys_are_cancelled() -> None:
    router = trio()
    to_decode, _ = sealed(router)
    router.lost(worker("d1"))
    ((_, submit),) = router.submits
    router.ended(worker("d2"), submit, EndReason.TAKE_OVER_REFUSED)
    old, new = to_decode.key.generation, submit.key.generation
    assert set(router.cancels) == {("d2", new), ("p", new), ("p", old)}
    assert all(one.take_over is None for _, one in router.submits)


def test_only_the_token_that_the_lease_carries_is_taken_over() -> None:
    router = trio()  # the seal is known, its token is still on its way
    router.generate()
    _, (_, to_prefill) = router.submits
    report = PrefillReport(to_prefill.key, 10, 0, 10)
    router.core.from_worker(0, worker("p").incarnation, report)
    router.lost(worker("d1"))
    assert len(router.submits) == 2
    assert all(one.take_over is None for _, one in router.submits)
    router = trio()  # more than that token was accepted, and not from the decode worker
    _, to_prefill = sealed(router)
    router.tokens(worker("p"), to_prefill, 11, 8)
    router.lost(worker("d1"))
    assert len(router.submits) == 2
    assert all(one.take_over is None for _, one in router.submits)


@pytest.mark.parametrize(
    ("other", "takes"),
    [
        (worker("q", "decode", handover_tokens_max=11, max_model_tokens=15), True),
        (worker("q", "decode", handover_tokens_max=10), False),
        (worker("q", "decode", max_model_tokens=14), False),
        (worker("q", "decode", contract=replace(CONTRACT, dtype="bfloat16")), False),
        (worker("q", "prefill"), False),
    ],
)
def test_who_takes_a_lease_over(other: WorkerInfo, takes: bool) -> None:
    router = Router(worker("p"), worker("d1", "decode"), other)
    router.core.from_worker(0, worker("p").incarnation, replace(STATS, num_running=1))
    sealed(router)
    router.lost(worker("d1"))
    assert [who for who, one in router.submits if one.take_over is not None] == ["q"] * takes


def test_who_had_no_room_does_not_take_over() -> None:
    router = trio()
    router.generate()
    (_, (_, to_prefill)) = router.submits
    router.ended(worker("p"), to_prefill, EndReason.RESERVE_REFUSED)  # at d1
    (decoding, (_, to_prefill)) = router.submits
    assert decoding[0] == "d2"
    report = PrefillReport(to_prefill.key, 10, 0, 10)
    router.core.from_worker(0, worker("p").incarnation, report)
    router.tokens(worker("p"), to_prefill, 10, 7)
    router.lost(worker("d2"))
    assert all(one.take_over is None for _, one in router.submits)


def test_the_least_loaded_takes_over() -> None:
    router = Router(*(worker(n, r) for n, r in (("p", "prefill"), ("d1", "decode"))))
    sealed(router)
    for name, running in (("d2", 3), ("d3", 2)):
        router.join(worker(name, "decode"), replace(STATS, num_running=running))
    router.lost(worker("d1"))
    assert [(who, one.take_over is None) for who, one in router.submits] == [("d3", False)]


def test_other_ends_of_a_part_take_nothing_over() -> None:
    for sender, reason in (("p", EndReason.PEER_LOST), ("d1", EndReason.READ_FAILED)):
        router = trio()
        submits = dict(zip(("d1", "p"), sealed(router), strict=True))
        router.ended(worker(sender), submits[sender], reason)
        assert [(who, one.role) for who, one in router.submits] == [(sender, Role.LOCAL)]


def test_a_lease_is_taken_over_from_who_took_it_over() -> None:
    router = trio()
    router.join(worker("d3", "decode"))
    to_decode, _ = sealed(router)
    for name, heir in (("d1", "d2"), ("d2", "d3")):
        router.ended(worker(name), to_decode, EndReason.PEER_LOST)
        ((who, submit),) = router.submits
        assert (who, submit.take_over) == (heir, to_decode.key)
        to_decode = submit


def test_the_last_plan_gives_the_lease_up_too() -> None:
    router = Router(*(worker(n, r) for n, r in (("p", "prefill"), ("d1", "decode"))), replans_max=0)
    router.join(worker("d2", "decode"))
    sealed(router)
    router.lost(worker("d1"))
    assert isinstance(router.error, RemoteFault)
    assert router.cancels == [("p", 1)]


def test_what_is_not_taken_over() -> None:
    router = trio()  # no token yet
    router.generate()
    router.lost(worker("d1"))
    assert all(one.take_over is None for _, one in router.submits)
    router = trio()  # handed over already
    to_decode, _ = sealed(router)
    router.pulled(worker("d1"), worker("p"), to_decode)
    router.lost(worker("d1"))
    assert all(one.take_over is None for _, one in router.submits)
    router = trio()  # the prefill worker died
    sealed(router)
    router.lost(worker("p"))
    assert all(one.take_over is None for _, one in router.submits)
    router = Router(worker("p", "prefill"), worker("d1", "decode"))  # nobody else
    sealed(router)
    router.lost(worker("d1"))
    assert all(one.take_over is None for _, one in router.submits)
