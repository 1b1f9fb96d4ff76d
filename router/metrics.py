"""Prometheus metrics of one router; docs/metrics.md lists every series."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)

from disagg.messages.reports import TransferReport
from disagg.messages.stats import WorkerStats
from disagg.router.core_metrics import CoreCollector
from disagg.router.keys import TENANTS_MAX
from disagg.router.plain_metrics import Count, PlainCounter, PlainHistogram
from disagg.router.token_metrics import ITL_BUCKETS, TokenMetrics
from disagg.router.vllm_metrics import Collects, VllmCollector
from disagg.router.worker_metrics import WorkerMetrics
from disagg.routing.measurements import FirstToken, PromptSources, RequestEnd

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 600)
PART_BUCKETS = (0.001, *TTFT_BUCKETS)
REQUEST_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
TRANSFER_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
LINES_MAX = 1000
"""In one piece, which takes half a millisecond; before the first counters of a thousand workers
some more pass, as all of them are sorted by name."""
TENANT_LABELS_MAX = 2 * TENANTS_MAX
OTHER_TENANTS = "(others)"
"""No name of a tenant."""
Registered = TypeVar("Registered", bound=Collects)


class Metrics:
    """Counts what the dispatcher sees. A registry of its own: several routers per process.

    Args:
        model_name: the one clients use; a label of every series about requests and workers.

    Attributes:
        tokens: what every token counts in.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._model_name = model_name
        self._own: list[Collects] = []
        self._tenants: set[str] = set()
        self._num_live = 0
        self._requests = self._counter(
            "requests",
            "Ended requests by outcome, with several choices once; errors by their code.",
            "outcome",
            "tenant",
        )
        self._gauge("requests_live", "Requests in progress.", lambda: self._num_live)
        self._ttft = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token at the router.",
            TTFT_BUCKETS,
        )
        self._ttft_part = self._histogram(
            "time_to_first_token_part_seconds",
            "The parts of it, which add up: queue, prefill, transfer, router.",
            PART_BUCKETS,
            "part",
        )
        self._tpot = self._histogram(
            "time_per_output_token_seconds",
            "Of a finished choice, mean over its tokens after the first.",
            ITL_BUCKETS,
            "role",
        )
        self._decode = self._histogram(
            "request_decode_seconds",
            "Of a finished choice, from its first token to its end.",
            REQUEST_BUCKETS,
            "role",
        )
        self._estimate_ratio = self._histogram(
            "estimate_ratio",
            "Expected over taken: the time from a plan to its first token, the time per token.",
            RATIO_BUCKETS,
            "of",
        )
        self._e2e = self._histogram(
            "request_seconds",
            "Of a finished request, from its arrival to the end of its last choice.",
            REQUEST_BUCKETS,
        )
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Tokens of prompts whose first token came.", "tenant"
        )
        self._prompt_sources = self._counter(
            "prompt_tokens_by_source",
            "The same, by where their KV came from, and the role of the worker that prefilled.",
            "source",
            "role",
        )
        self._transfer_read = self._histogram(
            "transfer_read_seconds",
            "Of a committed transfer, from its first READ posted to the last one done.",
            TRANSFER_BUCKETS,
            "kind",
        )
        self._transfer_exposed = self._histogram(
            "transfer_exposed_seconds",
            "Of a committed transfer, from the end of its offers to the commit.",
            TRANSFER_BUCKETS,
            "kind",
        )
        self._lag = self._histogram(
            "router_event_loop_lag_seconds",
            "How late ten turns a second came: so long streams stood still.",
            LAG_BUCKETS,
        )
        self._task_failures = Counter(
            "disagg_router_task_failures",
            "Exceptions in the router's own tasks: tick, kv_events, session, kv_event_subscriber, "
            "http, admin, keys, plan; "
            "each is a bug.",
            ["task"],
            registry=self.registry,
        )
        self.tokens = self._shown(TokenMetrics(model_name))
        self._workers = WorkerMetrics(model_name)
        self.registry.register(VllmCollector(model_name, self._own))

    def accepted(self) -> None:
        """A request was accepted, and is in progress."""
        self._num_live += 1

    def released(self) -> None:
        """An accepted request is in progress no more."""
        self._num_live -= 1

    def ended(self, outcome: str, tenant: str) -> None:
        """A request ended, accepted or not: ``stop``, ``length`` or an error's code."""
        self._requests.of(outcome, self._label(tenant)).num += 1

    def finished(self, e2e_ms: int) -> None:
        """A request ended as its client wanted it, so long after it came."""
        self._e2e.of().observe(e2e_ms / 1000)

    def choice_finished(self, end: RequestEnd) -> None:
        """A choice of a request ended as its client wanted it."""
        if end.decode_ms is not None:
            self._decode.of(end.decode_role).observe(end.decode_ms / 1000)
        if end.time_per_output_token_ms is not None:
            per_token_s = end.time_per_output_token_ms / 1000
            self._tpot.of(end.decode_role).observe(per_token_s)
        if end.estimate_ratio is not None:
            self._estimate_ratio.of("tpot").observe(end.estimate_ratio)

    def first_token(self, first: FirstToken) -> None:
        """A request had its first token."""
        self._ttft.of().observe(first.ttft_ms / 1000)
        if first.estimate_ratio is not None:
            self._estimate_ratio.of("ttft").observe(first.estimate_ratio)
        for part, part_ms in (
            ("queue", first.queue_ms),
            ("prefill", first.prefill_ms),
            ("transfer", first.transfer_ms),
            ("router", first.router_ms),
        ):
            self._ttft_part.of(part).observe(part_ms / 1000)

    def prompt(self, sources: PromptSources, role: str, tenant: str) -> None:
        """A prompt had its first token: now it counts, once for all; ``role``: who prefilled."""
        self._prompt_tokens.of(self._label(tenant)).num += sources.num_tokens
        for source, num_tokens in (
            ("local_compute", sources.local_compute),
            ("local_cache_hit", sources.local_cache_hit),
            ("external_kv_transfer", sources.external_kv_transfer),
        ):
            self._prompt_sources.of(source, role).num += num_tokens

    def delivered(self, tenant: str) -> Count:
        """What the tokens delivered to a tenant's clients are to be added to."""
        return self.tokens.delivered(self._label(tenant))

    def _label(self, tenant: str) -> str:
        """The tenant; OTHER_TENANTS for those that came, with new files of keys, after so many."""
        if tenant in self._tenants:
            return tenant
        if len(self._tenants) >= TENANT_LABELS_MAX:
            return OTHER_TENANTS
        self._tenants.add(tenant)
        return tenant

    def transfer(self, report: TransferReport) -> None:
        """A transfer was committed; those that failed are counted by their workers and plans."""
        if not report.failed:
            kind = report.kind
            self._transfer_read.of(kind).observe(report.read_ms / 1000)
            self._transfer_exposed.of(kind).observe(report.exposed_ms / 1000)

    def lagged(self, lag_s: float) -> None:
        """A turn of the router's event loop came so late."""
        self._lag.of().observe(max(0.0, lag_s))

    def task_failed(self, task: str) -> None:
        """Count an exception in one of the router's own tasks."""
        self._task_failures.labels(task).inc()

    def worker_stats(self, worker_id: str, role: str, stats: WorkerStats) -> None:
        """A worker's load and counters."""
        self._workers.report(worker_id, role, stats)

    def worker_left(self, worker_id: str) -> None:
        """Forget a worker, so that a dead one does not look alive."""
        self._workers.forget(worker_id)

    def show_core(
        self, counters: Mapping[tuple[str, str], int], num_waiting: Callable[[], int]
    ) -> None:
        """Include the core's counters and its queue, read at every scrape."""
        self._shown(CoreCollector(self._model_name, counters))
        text = "Requests that wait at the router for room at a worker."
        self._gauge("requests_waiting", text, num_waiting)

    def show_certificate(self, expires_s: Callable[[], float]) -> None:
        """Include when the router's certificate expires, in Unix time, read at every scrape."""
        text = "When the certificate between nodes expires, in Unix time."
        self._gauge("certificate_expiry_timestamp_seconds", text, expires_s)

    def pieces(self) -> Iterator[str]:
        """All metrics in Prometheus' text format, of workers as they are when it begins.

        Of a thousand workers it takes some 0.1 s: who shows it lets the streams go on in between.
        """
        texts = re.split("^# HELP ", generate_latest(self.registry).decode(), flags=re.MULTILINE)
        own = {text.partition(" ")[0]: f"# HELP {text}" for text in texts if text}
        for family in self._workers.families():
            # What waits at the router and at workers is one metric by vLLM's name.
            yield own.pop(family.name, family.head)
            while some := "".join(islice(family.lines, LINES_MAX)):
                yield some
        yield "".join(own.values())

    def text(self) -> str:
        """All of them at once."""
        return "".join(self.pieces())

    # --- making series

    def _counter(self, name: str, text: str, *labels: str) -> PlainCounter:
        return self._shown(PlainCounter(f"disagg_{name}", text, self._model_name, labels))

    def _gauge(self, name: str, text: str, now: Callable[[], float]) -> None:
        gauge = self._shown(Gauge(f"disagg_{name}", text, ["model_name"], registry=None))
        gauge.labels(self._model_name).set_function(now)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> PlainHistogram:
        return self._shown(
            PlainHistogram(f"disagg_{name}", text, self._model_name, labels, bounds=buckets)
        )

    def _shown(self, metric: Registered) -> Registered:
        self.registry.register(metric)
        self._own.append(metric)
        return metric
