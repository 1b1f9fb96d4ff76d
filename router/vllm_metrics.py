"""The same series once more under the names that vLLM's dashboards and alerts ask for.

Nothing is counted here: at every scrape the project's own series are read, renamed, and added up
over the labels that vLLM does not have. Names and meanings are those of vLLM 0.32,
``vllm/v1/metrics/loggers.py``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.metrics_core import Metric as AnyMetric
from prometheus_client.samples import Sample

WORKER = {"worker": "engine", "role": "role"}
ROUTER_ENGINE = {"engine": "router", "role": "router"}
SOURCES = ("hit", "pulled", "computed")


class Collects(Protocol):
    """What a registry takes."""

    def collect(self) -> Iterable[Metric]:
        """All metrics at this moment."""


@dataclass(frozen=True, slots=True)
class Alias:
    """One of vLLM's series.

    Attributes:
        name: vLLM's, without ``_total``.
        source: of the project's own.
        labels: that stay, by their name there, with their name here.
        only: values of labels that the samples taken have, by label.
        values: other words for a label's values, by its name here.
        constant: labels that all of it have.
    """

    name: str
    source: str
    labels: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    constant: Mapping[str, str] = field(default_factory=dict)


def _part(name: str, part: str) -> Alias:
    return Alias(name, "disagg_time_to_first_token_part_seconds", only={"part": (part,)})


TENANT = {"tenant": "tenant"}
ROLE = {"role": "role"}
ALIASES = (
    Alias("vllm:prompt_tokens", "disagg_prompt_tokens", TENANT),
    Alias("vllm:prompt_tokens_by_source", "disagg_prompt_tokens_by_source",
          {"source": "source"} | ROLE),
    Alias("vllm:generation_tokens", "disagg_generation_tokens", TENANT),
    Alias("vllm:request_success", "disagg_requests", {"outcome": "finished_reason"} | TENANT,
          only={"outcome": ("stop", "length", "cancelled")},
          values={"finished_reason": {"cancelled": "abort"}}),
    Alias("vllm:time_to_first_token_seconds", "disagg_time_to_first_token_seconds"),
    Alias("vllm:inter_token_latency_seconds", "disagg_inter_token_latency_seconds"),
    Alias("vllm:time_per_output_token_seconds", "disagg_inter_token_latency_seconds"),
    Alias("vllm:request_time_per_output_token_seconds", "disagg_time_per_output_token_seconds",
          ROLE),
    Alias("vllm:e2e_request_latency_seconds", "disagg_request_seconds"),
    _part("vllm:request_queue_time_seconds", "queue"),
    _part("vllm:request_prefill_time_seconds", "prefill"),
    Alias("vllm:request_decode_time_seconds", "disagg_request_decode_seconds", ROLE),
    Alias("vllm:num_requests_running", "disagg_worker_num_running", WORKER),
    Alias("vllm:num_requests_waiting", "disagg_worker_num_waiting", WORKER),
    Alias("vllm:num_requests_waiting", "disagg_requests_waiting", constant=ROUTER_ENGINE),
    Alias("vllm:kv_cache_usage_perc", "disagg_worker_kv_cache_usage_ratio", WORKER),
    Alias("vllm:num_preemptions", "disagg_worker_preemptions", WORKER),
    Alias("vllm:prefix_cache_queries", "disagg_routing_prefill_tokens",
          only={"source": SOURCES}),
    Alias("vllm:prefix_cache_hits", "disagg_routing_prefill_tokens", only={"source": ("hit",)}),
    Alias("vllm:external_prefix_cache_queries", "disagg_routing_prefill_tokens",
          only={"source": ("pulled", "computed")}),
    Alias("vllm:external_prefix_cache_hits", "disagg_routing_prefill_tokens",
          only={"source": ("pulled",)}),
    Alias("vllm:kv_block_lifetime_seconds", "disagg_cache_block_lifetime_seconds", WORKER),
    Alias("vllm:kv_block_idle_before_evict_seconds", "disagg_cache_block_idle_seconds", WORKER),
    Alias("vllm:kv_block_reuse_gap_seconds", "disagg_cache_block_reuse_gap_seconds", WORKER),
)  # fmt: skip
WORKER_ALIASES = {alias.source: alias.name for alias in ALIASES if alias.labels is WORKER}
"""Of the workers' metrics, which are no collectors': `WorkerMetrics` shows them by these names."""


class VllmCollector:
    """Shows the series of the router's own collectors under vLLM's names."""

    def __init__(self, model_name: str, collectors: Sequence[Collects]) -> None:
        self._model_name = model_name
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        """All metrics, for the registry that calls it."""
        own = {metric.name: metric for one in self._collectors for metric in one.collect()}
        families: dict[str, AnyMetric] = {}
        for alias in ALIASES:
            metric = own.get(alias.source)
            if metric is None:
                continue
            if alias.name not in families:
                text = f"As vLLM's; see {alias.source}."
                families[alias.name] = AnyMetric(alias.name, text, metric.type)
            families[alias.name].samples += self._renamed(alias, metric)
        yield from families.values()

    def _renamed(self, alias: Alias, metric: Metric) -> list[Sample]:
        """Its samples under the other name; those that only differed in a label left out as one."""
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in metric.samples:
            if sample.name.endswith("_created"):
                continue
            if any(sample.labels[name] not in taken for name, taken in alias.only.items()):
                continue
            labels = {"model_name": self._model_name, **alias.constant}
            if "le" in sample.labels:
                labels["le"] = sample.labels["le"]
            for name, here in alias.labels.items():
                value = sample.labels[name]
                labels[here] = alias.values.get(here, {}).get(value, value)
            key = alias.name + sample.name.removeprefix(alias.source), tuple(labels.items())
            sums[key] = sums.get(key, 0.0) + sample.value
        return [Sample(name, dict(labels), value) for (name, labels), value in sums.items()]
