"""The time to the first token in parts that add up; a prompt's tokens by where they came from."""

from dataclasses import replace

import pytest

from disagg.messages.outputs import FinishReason
from disagg.messages.reports import PrefillReport, PrefillTimes
from disagg.messages.submit import Submit
from disagg.routing.measurements import FirstToken, PromptSources, measure_end, measure_first_token
from tests.unit.routing.builders import Router, request, worker

P, D, D2 = worker("p", "prefill"), worker("d", "decode"), worker("d2", "decode")


def started(*, received_ms: int | None = None) -> tuple[Router, Submit]:
    router = Router(P, D)
    router.generate(replace(request(), received_ms=received_ms))
    return router, next(submit for who, submit in router.submits if who == "p")


def first_token(router: Router) -> FirstToken:
    return measure_first_token(router.record("r"))


def parts(first: FirstToken) -> tuple[int, int, int, int]:
    return first.queue_ms, first.prefill_ms, first.transfer_ms, first.router_ms


def report(submit: Submit, *times: int, hit: int = 4, pulled: int = 1) -> PrefillReport:
    computed = 10 - hit - pulled
    return PrefillReport(submit.key, 10, hit, computed, pulled, times=PrefillTimes(*times))


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((20, 5, 50), (20, 50, 5, 25)),
        ((0, 0, 0), (0, 0, 0, 100)),
        ((60, 30, 30), (40, 30, 30, 0)),  # the worker's clock ran ahead of ours
        ((900, 900, 900), (0, 100, 0, 0)),
    ],
)
def test_the_four_parts_are_the_time_to_the_first_token(
    times: tuple[int, int, int], expected: tuple[int, int, int, int]
) -> None:
    router, submit = started(received_ms=-30)
    router.core.from_worker(60, P.incarnation, report(submit, *times))
    router.now_ms = 70
    router.tokens(P, submit, 10, 1)
    first = first_token(router)
    assert parts(first) == expected
    assert sum(parts(first)) == first.ttft_ms == 100
    assert first.prefill_role == "prefill"


def test_the_time_until_a_request_comes_is_no_queue() -> None:
    router = Router(P, D)
    router.now_ms = 40
    router.generate(request())
    submit = next(submit for who, submit in router.submits if who == "p")
    router.core.from_worker(100, P.incarnation, report(submit, 20, 5, 10))
    router.now_ms = 140
    router.tokens(P, submit, 10, 1)
    assert parts(first_token(router)) == (20, 10, 5, 65)


def test_a_worker_that_measures_nothing_leaves_all_to_the_router() -> None:
    router, submit = started()
    router.core.from_worker(60, P.incarnation, PrefillReport(submit.key, 10, 4, 6))
    router.now_ms = 70
    router.tokens(P, submit, 10, 1)
    assert parts(first_token(router)) == (0, 0, 0, 70)


def test_the_sources_are_those_that_the_worker_found() -> None:
    router, submit = started()
    router.core.from_worker(1, P.incarnation, report(submit, 0, 0, 1))
    router.tokens(P, submit, 10, 1)
    assert first_token(router).sources == PromptSources(5, 4, 1)


def test_a_worker_lost_before_its_report_leaves_what_the_plan_expected() -> None:
    router, submit = started()
    router.tokens(P, submit, 10, 1)
    sources = first_token(router).sources
    assert sources == PromptSources(10, 0, 0)
    assert sources.num_tokens == 10


def test_the_end_has_the_times_of_the_whole_request() -> None:
    router, submit = started(received_ms=-10)
    router.now_ms = 30
    router.tokens(P, submit, 10, 1)
    router.pulled(D, P, submit)
    router.now_ms = 90
    router.tokens(D, submit, 11, 2, 3, 4, finish=FinishReason.STOP)
    end = measure_end(router.record("r"))
    assert (end.e2e_ms, end.decode_ms, end.time_per_output_token_ms) == (100, 60, 20.0)
    assert end.decode_role == "decode"


def test_one_token_has_no_time_per_further_token() -> None:
    router, submit = started()
    router.tokens(P, submit, 10, 1, finish=FinishReason.STOP)
    assert measure_end(router.record("r")).time_per_output_token_ms is None


def test_a_request_without_tokens_has_its_whole_time_only() -> None:
    router, _ = started()
    router.core.cancel(7, "r", "gone")
    end = measure_end(router.record("r"))
    assert (end.e2e_ms, end.decode_ms, end.time_per_output_token_ms) == (7, None, None)
