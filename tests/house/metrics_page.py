"""Writes the table of series in docs/metrics.md: ``python -m tests.house.metrics_page``."""

from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.reports import TransferKind, TransferReport
from disagg.messages.stats import RESIDENCY_BOUNDS_MS, ResidencyHistogram, WorkerStats
from disagg.router.core_metrics import LABELLED, PLAIN
from disagg.router.metrics import Metrics
from disagg.router.vllm_metrics import ALIASES
from disagg.router.worker_metrics import BY_CAUSE, BY_TIER, COUNTERS, RESIDENCY
from disagg.routing.measurements import FirstToken, PromptSources, RequestEnd

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
BEGIN, END = "<!-- table: python -m tests.house.metrics_page -->", "<!-- end of the table -->"


def metrics_with_everything() -> Metrics:
    """Every series with a sample."""
    metrics = Metrics("m")
    named = [*COUNTERS, *(f"{name}_x" for name in (*BY_CAUSE, *BY_TIER)), "tier_x_y", "x"]
    counts = (1,) * (len(RESIDENCY_BOUNDS_MS) + 1)
    stats = WorkerStats(
        *(1,) * 9,
        ready=True,
        counters=tuple((name, 1) for name in named),
        residency=tuple(ResidencyHistogram(name, counts, 1) for name in RESIDENCY),
    )
    metrics.worker_stats("w", "both", stats)
    metrics.accepted()
    sources = PromptSources(1, 1, 1)
    metrics.first_token(FirstToken(1, 1, 1, 1, sources, "both", 1.0))
    metrics.prompt(sources, "both", "")
    metrics.delivered("").num += 1
    metrics.tokens.waited(1, 0.1)
    metrics.ended("stop", "")
    metrics.finished(1)
    metrics.choice_finished(RequestEnd(1, 1, 1.0, "both", 1.0))
    metrics.lagged(0.1)
    metrics.task_failed("tick")
    key, owner = RequestKey("r", 1), Incarnation("w", "e")
    metrics.transfer(TransferReport(key, owner, (), 1, 1, 1, TransferKind.HANDOVER))
    metrics.show_certificate(lambda: 1.0)
    metrics.show_core({(name, "x"): 1 for name in (*PLAIN, *LABELLED)}, lambda: 0)
    return metrics


def table() -> str:
    """The table in Markdown."""
    aliases: dict[str, list[str]] = {}
    for alias in ALIASES:
        aliases.setdefault(alias.source, []).append(alias.name)
    rows = ["| series | type | labels | what | vLLM's names |", "|---|---|---|---|---|"]
    found = sorted(
        text_string_to_metric_families(metrics_with_everything().text()),
        key=lambda metric: metric.name,
    )
    own = (
        metric
        for metric in found
        if metric.name.startswith("disagg_") and not metric.name.endswith("_created")
    )
    rows += [_row(metric, aliases.get(metric.name, [])) for metric in own]
    return "\n".join([BEGIN, "", *rows, "", END])


def _row(metric: Metric, aliases: list[str]) -> str:
    total = "_total" if metric.type == "counter" else ""
    labels = {name for sample in metric.samples for name in sample.labels} - {"le"}
    names = [f"`{name}{total}`" for name in dict.fromkeys(aliases)]
    shown = ", ".join(f"`{name}`" for name in sorted(labels))
    return (
        f"| `{metric.name}{total}` | {metric.type} | {shown} | {metric.documentation} "
        f"| {', '.join(names)} |"
    )


if __name__ == "__main__":
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + table() + rest.partition(END)[2])
