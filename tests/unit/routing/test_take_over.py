"""Another decode worker takes over the lease of one that was lost before it had the prompt."""

from dataclasses import replace

import pytest

from disagg.errors import RemoteFault
from disagg.messages.outputs import FinishReason
from disagg.messages.registration import WorkerInfo
from disagg.messages.reports import PrefillReport
from disagg.messages.session import EndReason, PartEnded
from disagg.messages.submit import Role, Submit
from tests.unit.routing.builders import CONTRACT, STATS, Router, worker


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
        (worker("q", "decode", contract=replace(CONTRACT, page_format="other")), False),
        (worker("q", "prefill"), False),
    ],
)
def test_who_takes_a_lease_over(other: WorkerInfo, takes: bool) -> None:
    router = Router(worker("p"), worker("d1", "decode"), other, accept_unlike_workers=True)
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


def test_a_lease_from_before_a_reset_of_the_caches_is_not_taken_over() -> None:
    router = trio()
    sealed(router)
    router.did(router.core.reset_prefix_caches(0))
    router.lost(worker("d1"))
    assert len(router.submits) == 2
    assert all(one.take_over is None for _, one in router.submits)


def test_what_a_draining_worker_has_decoded_goes_on_at_another_one() -> None:
    router = Router(worker("a", "decode"))
    router.generate()
    ((_, submit),) = router.submits
    router.tokens(worker("a"), submit, 10, 7, 8)
    router.join(worker("b", "prefill"))  # it has to do, as there is no other decode worker
    router.core.from_worker(0, worker("a").incarnation, replace(STATS, ready=False, draining=True))
    kept = PartEnded(submit.key, EndReason.DRAINING, "", num_kept_tokens=11)
    router.did(router.core.from_worker(0, worker("a").incarnation, kept))
    ((name, second),) = router.submits
    assert (name, second.role, second.take_over) == ("b", Role.DECODE, submit.key)
    assert second.token_ids[-2:] == (7, 8)
    assert second.peer is not None
    assert second.peer.incarnation == worker("a").incarnation
    assert router.cancels == [], "who keeps the KV is not cancelled"


def test_what_was_kept_is_of_use_only_if_every_token_was_accepted() -> None:
    """Control: one token fewer is kept than accepted, so all is computed again."""
    router = Router(worker("a", "decode"))
    router.generate()
    ((_, submit),) = router.submits
    router.tokens(worker("a"), submit, 10, 7, 8)
    router.join(worker("b"))
    kept = PartEnded(submit.key, EndReason.DRAINING, "", num_kept_tokens=10)
    router.did(router.core.from_worker(0, worker("a").incarnation, kept))
    assert all(one.take_over is None for _, one in router.submits)
    assert ("a", submit.key.generation) in router.cancels
