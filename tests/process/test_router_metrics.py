"""Two routers over the same workers: what each counts of its own, and what both show."""

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, wait_until
from tests.process.replicas import Replicas, Router, collect, running, stream
from tests.process.served_model import WINDOW

pytestmark = pytest.mark.timeout(900)

LENGTH, NUM_TOKENS, LONG = 150, 6, 1_500
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("router_metrics")
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    started = Replicas(model_dir, folder, {"worker_silent_ms": 60_000})
    with running(started, "a", "b", p0="prefill", d0="decode") as replicas:
        yield replicas


def body(salt: int, num_tokens: int) -> dict[str, Any]:
    prompt = [7 + (salt * 13 + i * i) % 90 for i in range(LENGTH)]
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0,
        "ignore_eos": True,
    }  # fmt: skip


def serve(router: Router, salt: int, num_tokens: int = NUM_TOKENS, request_id: str = "") -> None:
    answer = collect(stream(router.http, body(salt, num_tokens), request_id))
    assert answer.done, answer


def series(router: Router) -> Series:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(router.admin.get("/metrics").text)
        for sample in family.samples
    }


def total(found: Series, name: str, **labels: str) -> float:
    return sum(
        value
        for (one, given), value in found.items()
        if one == name and labels.items() <= dict(given).items()
    )


def of_workers(router: Router) -> Series:
    """What it shows of the workers, but for times and gauges, which go on."""
    return {
        key: value
        for key, value in series(router).items()
        if key[0].startswith("disagg_worker_")
        and key[0].endswith("_total")
        and "seconds" not in key[0]
    }


def test_each_router_counts_its_own_and_both_show_the_same_workers(two: Replicas) -> None:
    a, b = two.routers["a"], two.routers["b"]
    for salt in (1, 2):
        serve(a, salt)
    serve(b, 3)
    for router, num in ((a, 2), (b, 1)):
        found = series(router)
        assert total(found, "disagg_requests_total", outcome="length") == num
        assert total(found, "vllm:request_success_total") == num
        assert total(found, "vllm:prompt_tokens_total") == num * LENGTH
        assert total(found, "vllm:prompt_tokens_by_source_total") == num * LENGTH
        assert total(found, "disagg_generation_tokens_total") == num * NUM_TOKENS
        assert total(found, "disagg_transfer_read_seconds_count") == num

    def agree() -> bool:
        return of_workers(a) == of_workers(b)

    wait_until(agree, "both routers to have the last stats")
    moved = [total(series(router), "disagg_routing_pulled_bytes_total") for router in (a, b)]
    assert 0 < moved[1] < moved[0]
    # Workers count everybody's: neither router's own figure, but their sum.
    assert total(series(a), "disagg_worker_pulled_bytes_total") == sum(moved)
    assert total(series(b), "disagg_worker_transfers_committed_total", role="decode") == 3


def test_a_request_sent_again_elsewhere_is_counted_as_superseded_where_it_was(
    two: Replicas,
) -> None:
    a, b = two.routers["a"], two.routers["b"]
    before = [total(series(r), "disagg_requests_total", outcome="length") for r in (a, b)]
    events = stream(a.http, body(5, LONG), "twice")
    next(events)
    serve(b, 5, NUM_TOKENS, "twice")
    answer = collect(events)
    assert answer.error is not None
    assert answer.error["code"] == "superseded"
    assert total(series(a), "disagg_requests_total", outcome="superseded") == 1
    assert total(series(b), "disagg_requests_total", outcome="superseded") == 0
    after = [total(series(r), "disagg_requests_total", outcome="length") for r in (a, b)]
    assert after == [before[0], before[1] + 1]
    assert total(series(a), "disagg_requests_live") == 0
