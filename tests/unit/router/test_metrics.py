"""The series: their types and units, vLLM's names for them, and that tokens are counted once."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from disagg.messages.stats import RESIDENCY_BOUNDS_MS, ResidencyHistogram, WorkerStats
from disagg.router.core_metrics import LABELLED, PLAIN
from disagg.router.metrics import LINES_MAX, Metrics
from disagg.router.vllm_metrics import ALIASES
from disagg.router.worker_metrics import GAUGES, PREFIX, series_of
from disagg.routing.measurements import FirstToken, PromptSources, RequestEnd
from tests.house.metrics_page import PAGE, metrics_with_everything, table

ROOT = Path(__file__).parents[3]
FIRST = FirstToken(100, 200, 50, 25, PromptSources(6, 3, 1), "prefill")
STATS = WorkerStats(
    1, 2, 3, 100, 75, 0, 0, 0, 0, ready=True,
    counters=(
        ("preemptions", 4), ("prefill_step_us", 1_500_000), ("transfers_failed_read_stuck", 2),
        ("tier_read_us_my_disk", 250_000), ("tier_corrupt_disk", 1), ("steps", 9),
    ),
    residency=(ResidencyHistogram("idle", (1,) * (len(RESIDENCY_BOUNDS_MS) + 1), 500),),
)  # fmt: skip


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items()) - {("model_name", "tiny")}): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, /, **labels: str) -> float:
    return samples(metrics)[name, frozenset(labels.items())]


def test_a_prompts_sources_add_up_to_its_tokens_under_both_names() -> None:
    metrics = Metrics("tiny")
    metrics.prompt(FIRST.sources, "prefill", "alice")
    metrics.prompt(FIRST.sources, "prefill", "bob")
    for start in ("disagg_", "vllm:"):
        found = {
            dict(labels)["source"]: number
            for (name, labels), number in samples(metrics).items()
            if name == f"{start}prompt_tokens_by_source_total"
        }
        assert found == {"local_compute": 12, "local_cache_hit": 6, "external_kv_transfer": 2}
        total = f"{start}prompt_tokens_total"
        by_tenant = [value(metrics, total, tenant=tenant) for tenant in ("alice", "bob")]
        assert sum(by_tenant) == sum(found.values()) == 20


def test_the_parts_of_the_time_to_the_first_token_add_up() -> None:
    metrics = Metrics("tiny")
    metrics.first_token(FIRST)
    name = "disagg_time_to_first_token_part_seconds_sum"
    parts = [value(metrics, name, part=part) for part in ("queue", "prefill", "transfer", "router")]
    assert parts == [0.1, 0.2, 0.05, 0.025]
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == 0.1
    assert value(metrics, "vllm:request_prefill_time_seconds_sum") == 0.2
    whole = value(metrics, "vllm:time_to_first_token_seconds_sum")
    assert abs(whole - sum(parts)) < 1e-9
    assert value(metrics, "disagg_time_to_first_token_seconds_sum") == whole


def test_an_error_is_no_success_under_vllms_name() -> None:
    metrics = Metrics("tiny")
    for outcome in ("stop", "cancelled", "remote_fault"):
        metrics.ended(outcome, "")
    metrics.finished(900)
    metrics.choice_finished(RequestEnd(900, 400, 20.0, "decode"))
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 1
    assert value(metrics, "vllm:request_decode_time_seconds_sum", role="decode") == 0.4
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum", role="decode") == 0.02
    success = {
        dict(labels)["finished_reason"]: number
        for (name, labels), number in samples(metrics).items()
        if name == "vllm:request_success_total"
    }
    assert success == {"stop": 1, "abort": 1}  # an error is none


def test_what_a_worker_reports_has_types_units_and_labels() -> None:
    metrics = Metrics("tiny")
    metrics.worker_stats("w", "decode", STATS)
    worker = {"worker": "w", "role": "decode"}
    for name, labels, expected in (
        ("num_running", {}, 2),
        ("kv_cache_usage_ratio", {}, 0.25),
        ("preemptions_total", {}, 4),
        ("prefill_step_seconds_total", {}, 1.5),
        ("transfers_failed_total", {"cause": "read_stuck"}, 2),
        ("tier_read_seconds_total", {"tier": "my_disk"}, 0.25),
        ("tier_events_total", {"tier": "disk", "event": "corrupt"}, 1),
        ("other_total", {"name": "steps"}, 9),
    ):
        assert value(metrics, PREFIX + name, **worker, **labels) == expected, name
    engine = {"engine": "w", "role": "decode"}
    assert value(metrics, "vllm:num_requests_running", **engine) == 2
    assert value(metrics, "vllm:kv_cache_usage_perc", **engine) == 0.25
    assert value(metrics, "vllm:kv_block_idle_before_evict_seconds_sum", **engine) == 0.5
    metrics.worker_left("w")
    assert not [name for name, labels in samples(metrics) if ("worker", "w") in labels]


def test_a_page_is_made_in_pieces_of_bounded_size() -> None:
    metrics = Metrics("tiny")
    for number in range(500):
        metrics.worker_stats(f"w{number}", "decode", STATS)
    pieces = list(metrics.pieces())
    assert max(piece.count("\n") for piece in pieces) <= LINES_MAX
    assert sum(piece.count("\n") for piece in pieces) > 10 * LINES_MAX, "control: it is long"


def test_what_waits_at_workers_and_at_the_router_is_one_metric_by_vllms_name() -> None:
    metrics = metrics_with_everything()
    names = [
        family.name for family in text_string_to_metric_families(metrics.text()) if family.samples
    ]
    assert len(names) == len(set(names)), "all lines of a metric stand together"
    found = [
        dict(labels)["engine"]
        for name, labels in samples(metrics)
        if name == "vllm:num_requests_waiting"
    ]
    assert sorted(found) == ["router", "w"]


def test_names_that_workers_make_up_break_no_line() -> None:
    metrics = Metrics('ti"ny')
    cause = 'a"b\\c\nd 1'
    counters = ((f"parts_ended_{cause}", 3), ((f"odd {cause}", 4)))
    metrics.worker_stats('w"1\n', "decode", replace(STATS, counters=counters))
    assert value(
        metrics, PREFIX + "parts_ended_total", reason=cause, role="decode", worker='w"1\n',
        model_name='ti"ny',
    ) == 3  # fmt: skip
    assert 4 in samples(metrics).values()


def test_what_counts_is_a_counter_and_what_is_now_a_gauge() -> None:
    families = {
        family.name: family.type
        for family in text_string_to_metric_families(metrics_with_everything().text())
    }
    assert families["disagg_worker_preemptions"] == "counter"
    assert families["vllm:prompt_tokens"] == "counter"
    for name in GAUGES:
        assert families[PREFIX + name] == "gauge"
    assert {alias.name for alias in ALIASES} <= families.keys()
    own = {name for name in families if name.startswith("disagg_")}
    assert {alias.source for alias in ALIASES} <= own
    for name in families:  # base units
        assert not name.endswith(("_ms", "_us", "_milliseconds", "_kib", "_mib")), name


def test_every_count_of_the_core_has_a_text_and_its_label_a_name() -> None:
    found = set()
    for path in (ROOT / "disagg/routing").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("counters"):
                assert isinstance(node.slice, ast.Tuple), ast.unparse(node)
                name, label = node.slice.elts
                assert isinstance(name, ast.Constant)
                found.add((name.value, not (isinstance(label, ast.Constant) and not label.value)))
    assert len(found) > 10
    assert {name for name, labelled in found if labelled} == LABELLED.keys()
    assert {name for name, labelled in found if not labelled} == PLAIN.keys()


def counted_names() -> Iterator[str]:
    """What the core of workers counts under; of a text that is made up its beginning."""
    for path in (ROOT / "disagg/scheduling").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add"
                and ast.unparse(node.func.value).endswith("counters")
            ):
                continue
            match node.args[0]:
                case ast.Constant(str(name)):
                    yield name
                case ast.BinOp(left=ast.Constant(str(start))):
                    yield start + "x"
                case ast.JoinedStr(values=[ast.Constant(str(start)), *_]):
                    yield start + "x"


def test_every_count_of_a_worker_has_a_name_here() -> None:
    names = list(counted_names())
    assert len(names) > 20
    unknown = [
        name for name in names if series_of(name).name in (PREFIX + "other", PREFIX + "tier_events")
    ]
    assert unknown == []


def test_the_page_has_the_table_of_the_code() -> None:
    assert table() in PAGE.read_text(), "python -m tests.house.metrics_page writes it"
