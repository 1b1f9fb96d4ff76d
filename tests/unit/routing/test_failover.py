"""What the router does when a part ends, a worker is lost, or all tries are used up."""

from dataclasses import replace
from typing import Any

import pytest

from disagg.errors import CapacityError, RemoteFault, RequestError
from disagg.messages.outputs import FinishReason
from disagg.messages.registration import WorkerInfo
from disagg.messages.session import EndReason, receipt_of
from disagg.messages.submit import Role, Submit
from disagg.routing.actions import Connect, Disconnect, NewRequest
from disagg.routing.request import KILLS_MAX
from tests.unit.routing.builders import STATS, Router, hashes_of, request, worker

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


@pytest.mark.parametrize(
    ("echoes", "reason", "expected"),
    [
        (D, EndReason.RESERVE_REFUSED, [("d2", Role.DECODE), ("p", Role.PREFILL)]),
        (D, EndReason.LEASE_DEAD, [("d", Role.LOCAL)]),
        (P, EndReason.READ_STUCK, [("d", Role.LOCAL)]),
        (P, EndReason.EXPIRED, [("d", Role.LOCAL)]),
        (P, EndReason.STEP_FAILED, [("p", Role.LOCAL)]),  # not of the hand-over
    ],
)
def test_an_echo_that_comes_first_tells_the_cause(
    echoes: WorkerInfo, reason: EndReason, expected: list[tuple[str, Role]]
) -> None:
    """Two streams have no order: what the peer heard may arrive before what it heard it of."""
    router, submit = started(P, D, D2)
    router.ended(echoes, submit, EndReason.PEER_ENDED, reason.value)
    assert [(who, again.role) for who, again in router.submits] == expected


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


def decodes(router: Router, request_id: str, *workers: WorkerInfo) -> Submit:
    """The next hand-over, with nobody loaded; its part of the worker that decodes."""
    for info in workers:
        router.join(info)
    router.generate(request(request_id))
    return router.submits[0][1]


@pytest.mark.parametrize(
    ("reason", "again_ms"), [(EndReason.READ_STUCK, 200), (EndReason.READ_FAILED, 100)]
)
def test_a_pair_whose_probe_ends_with_a_stuck_read_rests_for_longer(
    reason: EndReason, again_ms: int
) -> None:
    router, submit = started(P, D, D2)
    router.ended(D, submit, reason)
    router.now_ms = 101
    submit = decodes(router, "probe", P, D, D2)
    assert router.submits[0][0] == "d"
    router.ended(D, submit, reason)
    router.now_ms = 100 + again_ms
    decodes(router, "early", P, D, D2)
    assert router.submits[0][0] == "d2"
    router.now_ms = 102 + again_ms
    decodes(router, "later", P, D, D2)
    assert router.submits[0][0] == "d"


@pytest.mark.parametrize(
    ("reason", "who"), [(EndReason.READ_STUCK, "d2"), (EndReason.READ_FAILED, "d")]
)
def test_the_next_life_of_who_met_a_stuck_read_rests_as_well(reason: EndReason, who: str) -> None:
    router, submit = started(P, D, D2)
    router.ended(D, submit, reason)
    router.lost(D)
    decodes(router, "again", P, worker("d", "decode", epoch="e2"), D2)
    assert router.submits[0][0] == who


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


@pytest.mark.parametrize("heard", [False, True])
def test_a_worker_that_was_dead_before_the_plan_speaks_against_no_request(heard: bool) -> None:
    names = ("b", "c", "e", "f")
    router, _ = started(*map(worker, names), new=request(num_tokens=600))
    died = []
    for _ in names[1:]:
        name, submit = router.submits[0]
        died.append(name)
        if heard:
            receipt = receipt_of(submit)
            router.core.from_worker(router.now_ms, worker(name).incarnation, receipt)
        router.now_ms += 10
        router.lost(worker(name))
        if not router.submits:
            break
    if heard:  # control: it was alive with the request
        assert len(died) == KILLS_MAX
        assert isinstance(router.error, RemoteFault)
    else:
        assert sorted({*died, router.submits[0][0]}) == sorted(names)


def test_plans_onto_the_dead_have_a_bound() -> None:
    router, _ = started(*map(worker, ("b", "c", "e")), new=request(), replans_max=1)
    for _ in range(2):
        router.now_ms += 10
        router.lost(worker(router.submits[0][0]))
    assert "given up after 2 plans" in str(router.error)


def test_a_claim_to_the_id_of_a_live_worker_ends_nothing() -> None:
    router, _ = started(P, D, D2)
    actions = router.core.register(0, worker("d", "decode", epoch="e2"))
    assert not any(isinstance(action, Connect | Disconnect) for action in actions)
    router.did(actions)
    assert (router.disconnected, router.submits) == ([], [])
    router.lost(D)  # control: its loss does
    assert [who for who, _ in router.submits] == ["d2", "p"]


@pytest.mark.parametrize(
    ("who", "reason", "text"),
    [
        (D, EndReason.NO_TOKEN, "no answer can match it"),
        # The other worker's report of it came first.
        (P, EndReason.PEER_ENDED, EndReason.NO_TOKEN.value),
    ],
)
def test_what_nothing_can_follow_fails_at_once(
    who: WorkerInfo, reason: EndReason, text: str
) -> None:
    """It would end so at any worker."""
    router, submit = started(P, D, D2)
    router.tokens(P, submit, 10, 1)
    router.ended(who, submit, reason, text)
    assert isinstance(router.error, RequestError)
    assert router.error.param == "response_format"
    said = text if reason is EndReason.NO_TOKEN else "no token can follow"
    assert router.error.message == said
    assert len(router.record("r").generations) == 1
