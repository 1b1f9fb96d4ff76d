"""Every rule of a request's life, one example each, on the production core."""

from dataclasses import replace
from typing import Any

import pytest

from disagg.errors import (
    CapacityError,
    ContextLengthError,
    ExpiredError,
    ProtocolError,
    RemoteFault,
    RequestError,
)
from disagg.messages.identity import RequestKey
from disagg.messages.outputs import FinishReason, SequenceOutput, StepOutputs
from disagg.messages.registration import WorkerInfo
from disagg.messages.reports import PrefillReport, TransferKind, TransferReport
from disagg.messages.sampling import TokenLogprobs
from disagg.messages.session import EndReason, PartEnded, PrefillProgress, ToRouterMessage
from disagg.messages.submit import PeerAddress, Role, Submit
from disagg.routing import request_lifecycle
from disagg.routing.actions import Deliver, NewRequest
from tests.unit.routing.builders import Router, hashes_of, request, worker

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


def test_hand_over_tells_the_decode_worker_first_and_names_the_peers() -> None:
    router, _ = started(P, D)
    (first, decode), (second, prefill) = router.submits
    assert (first, decode.role, decode.peer) == (
        "d",
        Role.DECODE,
        PeerAddress(P.incarnation, P.address),
    )
    assert (second, prefill.role, prefill.peer) == (
        "p",
        Role.PREFILL,
        PeerAddress(D.incarnation, D.address),
    )
    assert decode.key == prefill.key
    assert decode.token_ids == prefill.token_ids == request().token_ids


def test_a_first_plan_copies_neither_tokens_nor_hashes() -> None:
    """Of a prompt of 131,072 tokens the copies would take as long as the plan."""
    router = Router(P, D)
    new = replace(request(), revision=router.core.assign("r"))
    router.generate(new)
    assert all(sent.token_ids is new.token_ids for _, sent in router.submits)
    assert all(sent.hashes is new.hashes for _, sent in router.submits)


def test_token_zero_from_both_sides_is_delivered_once() -> None:
    router, submit = started(P, D)
    assert router.tokens(P, submit, 10, 1)
    assert router.delivered == [1]
    assert router.tokens(D, submit, 10, 1) == []
    router.tokens(D, submit, 11, 2)
    assert router.delivered == [2]


def test_tokens_that_overtake_token_zero_wait_for_it() -> None:
    router, submit = started(P, D)
    assert router.tokens(D, submit, 11, 2, 3) == []
    router.tokens(P, submit, 10, 1)
    assert router.delivered == [1, 2, 3]


def test_too_many_waiting_tokens_plan_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_lifecycle, "AHEAD_MAX", 2)
    router, submit = started(P, D)
    assert router.tokens(D, submit, 11, 2, 3) == []
    router.tokens(D, submit, 13, 4)
    assert len(router.submits) == 2
    assert router.core.counters["replans", "gap"] == 1


def test_a_gap_in_one_ordered_stream_plans_anew() -> None:
    router, submit = started(B)
    router.tokens(B, submit, 11, 2)
    assert [s.key.generation for _, s in router.submits] == [2]


def test_contradicting_tokens_fail_the_request_and_are_not_delivered() -> None:
    router, submit = started(P, D)
    router.tokens(P, submit, 10, 1)
    router.tokens(D, submit, 10, 9, 2)
    assert router.delivered == []
    assert isinstance(router.error, ProtocolError)
    assert sorted(router.cancels) == [("d", 1), ("p", 1)]
    assert router.tokens(D, submit, 11, 2) == []


def test_contradiction_among_waiting_tokens_fails_the_request() -> None:
    router, submit = started(P, D)
    router.tokens(D, submit, 11, 2)
    router.tokens(D, submit, 11, 3)
    assert isinstance(router.error, ProtocolError)


def test_finish_reason_goes_out_with_the_last_token_and_nothing_follows() -> None:
    router, submit = started(P, D)
    router.tokens(P, submit, 10, 1)
    router.tokens(D, submit, 10, 1, 2, finish=FinishReason.STOP)
    assert (router.delivered, router.finish) == ([2], [FinishReason.STOP])
    assert router.cancels == []  # the decode worker ended by itself, the prefill part is over
    assert router.tokens(D, submit, 12, 3) == []
    assert router.core.num_live == 0


def test_finish_reported_before_its_token_arrived_waits_for_it() -> None:
    router, submit = started(P, D)
    assert router.tokens(D, submit, 11, 2, finish=FinishReason.STOP) == []
    router.tokens(P, submit, 10, 1)
    assert (router.delivered, router.finish) == ([1, 2], [FinishReason.STOP])


def test_token_zero_that_ends_the_request_cancels_the_decode_part() -> None:
    router, submit = started(P, D)
    router.tokens(P, submit, 10, 1, finish=FinishReason.STOP)
    assert router.finish == [FinishReason.STOP]
    assert router.cancels == [("d", 1)]


def test_never_more_than_max_tokens() -> None:
    router, submit = started(B, new=request(max_tokens=2))
    router.tokens(B, submit, 10, 1, 2, 3)
    assert (router.delivered, router.finish) == ([1, 2], [FinishReason.LENGTH])
    assert router.cancels == [("b", 1)]  # it did not end by itself


def test_cancel_reaches_both_and_late_messages_change_nothing() -> None:
    router, submit = started(P, D)
    router.did(router.core.cancel(0, "r", "client went away"))
    assert sorted(router.cancels) == [("d", 1), ("p", 1)]
    assert router.tokens(P, submit, 10, 1) == []
    assert router.ended(D, submit, EndReason.CANCELLED) == []
    assert router.core.cancel(0, "r", "again") == []
    assert router.record("r").outcome == "cancelled"


def test_a_reused_request_id_never_repeats_a_key() -> None:
    router, submit = started(B)
    router.core.cancel(0, "r", "")
    router.generate()
    assert router.submits[0][1].key != submit.key
    assert router.tokens(B, submit, 10, 1) == []


def test_no_progress_expires() -> None:
    router, submit = started(B, worker_silent_ms=10_000)
    router.now_ms = 900
    router.tokens(B, submit, 10, 1)
    assert router.core.tick(1900) == []
    router.did(router.core.tick(1901))
    assert isinstance(router.error, ExpiredError)
    assert router.cancels == [("b", 1)]


def test_a_prefill_that_goes_on_renews_the_patience() -> None:
    router, submit = started(P, D, D2, worker_silent_ms=100_000)

    def progress(who: WorkerInfo, key: RequestKey, num_computed_tokens: int, now_ms: int) -> None:
        message = PrefillProgress(key, num_computed_tokens)
        assert router.core.from_worker(now_ms, who.incarnation, message) == []

    for step in (1, 2, 3):
        progress(P, submit.key, 2 * step, 900 * step)
        assert router.core.tick(900 * step + 1000) == []
    progress(P, submit.key, 6, 3600)  # standing still
    progress(P, submit.key, 4, 3600)  # preempted, computing what it had
    progress(P, submit.key, 11, 3600)  # more than the prompt
    progress(P, RequestKey("r", submit.key.generation - 1), 8, 3600)  # an old generation
    progress(D2, submit.key, 8, 3600)  # no part in it
    assert router.core.tick(3700) == []
    router.did(router.core.tick(3701))
    assert isinstance(router.error, ExpiredError)


def test_what_a_pull_that_was_given_up_had_is_computed_anew() -> None:
    router, submit = started(B, worker_silent_ms=100_000)

    def hears(message: PrefillProgress | TransferReport, now_ms: int) -> None:
        router.core.from_worker(now_ms, B.incarnation, message)

    hears(PrefillProgress(submit.key, 9), 900)  # read
    given_up = TransferReport(
        submit.key, P.incarnation, (), 0, 0, 0, TransferKind.PREFIX, failed="timeout: too slow"
    )
    hears(given_up, 1800)
    hears(PrefillProgress(submit.key, 2), 2700)  # computed
    assert router.core.tick(3700) == []
    hears(given_up, 3700)  # repeated
    hears(PrefillProgress(submit.key, 2), 3700)
    router.did(router.core.tick(3701))
    assert isinstance(router.error, ExpiredError)


def test_each_token_and_each_plan_counts_computed_positions_from_the_start() -> None:
    router, submit = started(B, worker_silent_ms=100_000)

    def progress(key: RequestKey, num_computed_tokens: int, now_ms: int) -> None:
        message = PrefillProgress(key, num_computed_tokens)
        router.core.from_worker(now_ms, B.incarnation, message)

    progress(submit.key, 10, 500)
    router.tokens(B, submit, 10, 1)
    progress(submit.key, 4, 1000)  # preempted while it decodes
    assert router.core.tick(2000) == []
    router.now_ms = 2000
    router.ended(B, submit, EndReason.STEP_FAILED)
    progress(router.submits[0][1].key, 4, 3000)
    assert router.core.tick(4000) == []
    router.did(router.core.tick(4001))
    assert isinstance(router.error, ExpiredError)


def test_what_generate_refuses() -> None:
    router = Router(B, requests_max=1)
    with pytest.raises(ContextLengthError):
        router.generate(request(max_tokens=991))
    for bad in (request(num_tokens=0), request(max_tokens=-1)):
        with pytest.raises(RequestError):
            router.generate(bad)
    surplus = hashes_of(tuple(range(16)))
    bad = replace(request(), hashes=surplus, revision=router.core.assign("r"))
    with pytest.raises(RequestError, match="hashes"):
        router.generate(bad)
    router.generate()
    with pytest.raises(RequestError, match="id"):
        router.generate()
    with pytest.raises(CapacityError):
        router.generate(request("other"))
    with pytest.raises(RemoteFault):
        Router().generate()
    assert router.core.num_live == 1


def test_logprobs_travel_with_their_tokens_and_their_loss_is_an_error() -> None:
    router, submit = started(P, D, new=request(num_logprobs=0))
    one, two = TokenLogprobs(-1.0), TokenLogprobs(-2.0)
    for who, output in (
        (D, SequenceOutput(submit.key, 11, (2,), (two,))),
        (P, SequenceOutput(submit.key, 10, (1,), (one,))),
    ):
        router.did(router.core.from_worker(0, who.incarnation, StepOutputs((output,))))
    assert router.actions == [Deliver("r", (1, 2), (one, two), FinishReason.NONE)]
    router.tokens(D, submit, 12, 3)
    assert isinstance(router.error, ProtocolError)


def test_the_record_explains_itself() -> None:
    router, submit = started(P, D)
    router.now_ms = 5
    router.tokens(P, submit, 10, 1)
    report = PrefillReport(submit.key, 10, 4, 6)
    router.core.from_worker(6, P.incarnation, report)
    router.pulled(D, P, submit)
    router.now_ms = 9
    router.tokens(D, submit, 10, 1, 2, finish=FinishReason.STOP)
    record = router.record("r")
    assert (record.submitted_ms, record.first_token_ms, record.finished_ms) == (0, 5, 9)
    assert (record.num_tokens, record.outcome, record.cached_tokens) == (2, "stop", 4)
    (generation,) = record.generations
    assert (generation.prefill, generation.decode) == (P.incarnation, D.incarnation)
    assert generation.transfer == TransferReport(submit.key, P.incarnation, (), 1, 2, 3)
    assert "prefill on p" in generation.reason


def test_a_report_behind_the_last_token_still_completes_the_record() -> None:
    router, submit = started(B, new=request(max_tokens=1))
    router.tokens(B, submit, 10, 1, finish=FinishReason.LENGTH)
    router.core.from_worker(3, B.incarnation, PrefillReport(submit.key, 10, 8, 2))
    assert router.record("r").cached_tokens == 8


def test_a_report_renews_the_patience_once() -> None:
    router, submit = started(P, D, worker_silent_ms=100_000)
    report = PrefillReport(submit.key, 10, 0, 10)
    for now_ms in (900, 1500):
        router.core.from_worker(now_ms, P.incarnation, report)
    assert router.core.tick(1900) == []
    router.did(router.core.tick(1901))
    assert isinstance(router.error, ExpiredError)
    assert "1000 are waited" in router.error.message
    assert "prefill on p" in router.error.message


def test_only_the_first_report_of_the_worker_that_did_it_counts() -> None:
    router, submit = started(P, D)
    prefill = PrefillReport(submit.key, 10, 4, 6)
    handover = TransferReport(submit.key, P.incarnation, (), 1, 2, 3)
    pull = replace(handover, kind=TransferKind.PREFIX)
    cases: list[tuple[WorkerInfo, WorkerInfo, ToRouterMessage, ToRouterMessage]] = [
        (P, D, prefill, replace(prefill, hit_tokens=9)),
        (P, D, pull, replace(pull, num_reads=9)),
        (D, P, handover, replace(handover, num_reads=9)),
    ]
    for right, wrong, report, repeated in cases:
        for sender, message in ((wrong, repeated), (right, report), (right, repeated)):
            assert router.core.from_worker(0, sender.incarnation, message) == []
    (generation,) = router.record("r").generations
    assert (generation.hit_tokens, generation.pull, generation.transfer) == (4, pull, handover)
    assert router.core.counters["prefill_tokens", "hit"] == 4
    assert router.core.counters["prefix_pulls", "committed"] == 1


def test_records_are_bounded() -> None:
    router = Router(B, records_max=2)
    for i in range(3):
        router.generate(request(f"r{i}"))
        router.core.cancel(0, f"r{i}", "")
    assert router.core.record("r0") is None
    assert router.core.record("r2") is not None


def test_unknown_senders_and_keys_are_ignored() -> None:
    router = Router(B)
    stranger = worker("x").incarnation
    ended = PartEnded(RequestKey("nobody", 1), EndReason.CAPACITY)
    assert router.core.from_worker(0, stranger, ended) == []
    assert router.core.from_worker(0, B.incarnation, ended) == []
