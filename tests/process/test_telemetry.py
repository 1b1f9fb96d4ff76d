"""Metrics and spans of real processes: an OTLP collector in the test, mixed traffic, fail-over."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from functools import partial
from typing import Any

import grpc
import pytest
import torch
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, Cluster, running, wait_until
from tests.process.served_model import WINDOW, ServedModel, assert_exact

pytestmark = pytest.mark.timeout(900)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Totals = dict[str, dict[str, float]]
PARTS = ("queue", "prefill", "transfer", "router")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span it is sent, with the service that sent it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            named = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(named["disagg.role"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> dict[str, tuple[str, Span]]:
        found = [one for one in self.spans if one[1].trace_id.hex() == trace_id]
        return {span.name: (role, span) for role, span in found}


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    kept = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture(scope="module")
def served(
    collector: tuple[Collector, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("telemetry")
    directory = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    tracing = {"traces": "otlp", "traces_endpoint": collector[1], "log_format": "json"}
    cluster = Cluster(
        directory,
        folder,
        {"tiers": ("host?size=64MiB",), **tracing},
        {"log_requests": True, "pull_tokens_min": 64, **tracing},
    )
    with running(cluster, p0="prefill", d0="decode", d1="decode"):
        yield ServedModel(cluster)


def totals(served: ServedModel) -> Totals:
    """Every series, summed by the label that splits it."""
    found: Totals = {}
    for family in text_string_to_metric_families(served.cluster.admin.get("/metrics").text):
        for sample in family.samples:
            split = sample.labels.get("source") or sample.labels.get("part") or ""
            sums = found.setdefault(sample.name, {})
            sums[split] = sums.get(split, 0) + sample.value
    return found


def growth(before: Totals, now: Totals, name: str) -> dict[str, float]:
    """By how much a series has grown."""
    old = before.get(name, {})
    return {label: value - old.get(label, 0) for label, value in now[name].items()}


def ask(served: ServedModel, prompt: list[int], name: str, **headers: str) -> int:
    """A completion; returns the number of its prompt's tokens."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0}
    answer = served.cluster.http.post(
        "/v1/completions", json=body, headers={"x-request-id": name, **headers}
    )
    assert answer.status_code == 200, answer.text
    usage: dict[str, int] = answer.json()["usage"]
    return usage["prompt_tokens"]


def test_one_call_is_one_trace_from_the_client_to_the_decode(
    served: ServedModel, collector: tuple[Collector, str]
) -> None:
    prompt = list(served.prompt(150).prompt)
    ask(served, prompt, "traced", traceparent=f"00-{TRACE}-{PARENT}-01")
    wanted = {
        "POST /v1/completions", f"text_completion {MODEL}",
        f"prefill {MODEL}", "kv.transfer", f"decode {MODEL}",
    }  # fmt: skip

    def complete() -> dict[str, tuple[str, Span]] | None:
        found = collector[0].of_trace(TRACE)
        return found if found.keys() >= wanted else None

    spans = wait_until(complete, f"spans {wanted}")
    call, generation, prefill, transfer, decode = (
        spans[name]
        for name in (
            "POST /v1/completions", f"text_completion {MODEL}",
            f"prefill {MODEL}", "kv.transfer", f"decode {MODEL}",
        )
    )  # fmt: skip
    assert [role for role, _ in (call, generation, prefill, transfer, decode)] == [
        "router", "router", "prefill", "decode", "decode",
    ]  # fmt: skip
    assert call[1].parent_span_id.hex() == PARENT
    assert generation[1].parent_span_id == call[1].span_id
    assert prefill[1].parent_span_id == generation[1].span_id
    assert transfer[1].parent_span_id == prefill[1].span_id  # told by Reserve
    assert decode[1].parent_span_id == generation[1].span_id
    said = {one.key: one.value for one in generation[1].attributes}
    assert said["gen_ai.request.model"].string_value == MODEL
    assert said["gen_ai.usage.input_tokens"].int_value == 150
    assert said["gen_ai.usage.output_tokens"].int_value == 6
    assert said["disagg.prefill_worker"].string_value == "p0"


def test_choices_are_spans_of_one_call_which_counts_once(
    served: ServedModel, collector: tuple[Collector, str]
) -> None:
    before, trace = totals(served), TRACE[::-1]
    prompts = [list(served.prompt(length, salt="choices").prompt) for length in (100, 70)]
    answer = served.cluster.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": prompts, "n": 2, "max_tokens": 6, "seed": 3},
        headers={"traceparent": f"00-{trace}-{PARENT}-01"},
    )
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == 170
    grown = partial(growth, before, totals(served))
    sources = grown("vllm:prompt_tokens_by_source_total")
    assert sum(sources.values()) == 170
    assert grown("vllm:prompt_tokens_total") == {"": 170}
    # Control: both choices of both prompts were prefilled, the later ones mostly from the cache.
    assert sum(grown("disagg_routing_prefill_tokens_total").values()) == 2 * 170
    assert grown("disagg_routing_prefill_tokens_total")["hit"] > sources["local_cache_hit"]
    assert sum(grown("vllm:request_success_total").values()) == 1
    assert grown("disagg_request_seconds_count") == {"": 1}
    assert grown("disagg_request_decode_seconds_count") == {"": 4}

    each = (f"text_completion {MODEL}", f"prefill {MODEL}", f"decode {MODEL}")
    wanted = Counter({"POST /v1/completions": 1} | dict.fromkeys(each, 4))

    def spans() -> list[Span] | None:
        found = [span for _, span in collector[0].spans if span.trace_id.hex() == trace]
        names = Counter(span.name for span in found)
        return found if wanted <= names else None  # each process sends its own when it likes

    named = wait_until(spans, "the spans of four choices")
    (call,) = [span for span in named if span.name == "POST /v1/completions"]
    choices = [span for span in named if span.name == f"text_completion {MODEL}"]
    assert [span.parent_span_id for span in choices] == [call.span_id] * 4
    prefills = [span for span in named if span.name == f"prefill {MODEL}"]
    assert {span.parent_span_id for span in prefills} == {span.span_id for span in choices}


def test_lines_of_the_log_are_json_with_the_requests_id(served: ServedModel) -> None:
    ask(served, list(served.prompt(40, 3).prompt), "logged")

    def lines() -> list[dict[str, Any]]:
        texts = [text for text in served.cluster.router.logged().splitlines() if "logged" in text]
        return [json.loads(text) for text in texts if text.startswith("{")]

    (line,) = wait_until(lines, "the line of the request")
    assert (line["request_id"], line["outcome"], line["num_tokens"]) == ("logged", "length", 6)
    assert line["role"] == "router"


def test_sources_and_parts_add_up_over_mixed_traffic_and_fail_over(served: ServedModel) -> None:
    cluster, before = served.cluster, totals(served)
    long = list(served.prompt(200, 5).prompt)
    num_tokens = sum(ask(served, long, f"again-{n}") for n in range(3))  # hand-over, then hits
    num_tokens += ask(served, list(served.prompt(30, 6).prompt), "short")
    expected = served.prompt(150, 7)
    told = cluster.tell("p0", "hold steps")
    answer = served.ask_later(expected, "failed-over")
    cluster.wait_told("p0", "held steps", told)
    cluster.workers["p0"].kill()
    assert_exact(answer.result(), expected)
    num_tokens += 150
    assert len(cluster.record("failed-over")["generations"]) > 1

    grown = partial(growth, before, totals(served))
    for start in ("disagg_", "vllm:"):
        sources = grown(f"{start}prompt_tokens_by_source_total")
        assert sum(sources.values()) == num_tokens
        assert grown(f"{start}prompt_tokens_total") == {"": num_tokens}
        assert sources["local_cache_hit"] > 0
    parts = grown("disagg_time_to_first_token_part_seconds_sum")
    assert set(parts) == set(PARTS)
    whole = grown("disagg_time_to_first_token_seconds_sum")[""]
    assert sum(parts.values()) == pytest.approx(whole, abs=1e-6)
    assert grown("disagg_time_to_first_token_seconds_count") == {"": 5}
    tokens = grown("disagg_generation_tokens_total")[""]
    assert tokens == 4 * 6 + len(expected.token_ids)
