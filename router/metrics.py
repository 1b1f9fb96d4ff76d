"""Prometheus metrics of one router; every series is named here."""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from disagg.messages.identity import Incarnation
from disagg.messages.session import (
    RESIDENCY_BOUNDS_MS,
    ResidencyHistogram,
    TransferReport,
    WorkerStats,
)
from disagg.router.keys import TENANTS_MAX

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
TRANSFER_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
GAUGES = (
    "num_waiting",
    "num_running",
    "num_prefill_tokens_queued",
    "num_blocks_usable",
    "num_blocks_free",
    "num_leases",
    "num_reservations",
    "num_inbound",
    "num_blocks_quarantined",
    "ready",
)


RESIDENCY = {
    "lifetime": "Of an observed block, from the caching of a content to its eviction.",
    "idle": "Of an observed block, from when its content was last found to its eviction.",
    "reuse_gap": "Of an observed block, between two times that its content was found.",
}
TENANT_LABELS_MAX = 2 * TENANTS_MAX
OTHER_TENANTS = "(others)"
"""No name of a tenant."""
CORE_LABELS = {
    "cache_resets": "outcome",
    "full_bytes": "kind",
    "plans": "kind",
    "prefill_tokens": "source",
    "prefix_pulled_bytes": "kind",
    "prefix_pulls": "outcome",
    "pulled_bytes": "kind",
    "replans": "cause",
    "requests_ended": "outcome",
    "requests_refused": "cause",
    "workers_lost": "cause",
}
"""How the label of each of the core's counters is called; the others have none."""


class CoreCollector:
    """Shows the core's own counters as ``disagg_routing_<name>_total``."""

    def __init__(self, counters: Mapping[tuple[str, str], int]) -> None:
        self._counters = counters

    def collect(self) -> Iterator[CounterMetricFamily]:
        """All metrics, for the registry that calls it."""
        families: dict[str, CounterMetricFamily] = {}
        for (name, label), value in sorted(self._counters.items()):
            label_name = CORE_LABELS.get(name, "label" if label else "")
            if name not in families:
                families[name] = CounterMetricFamily(
                    f"disagg_routing_{name}",
                    f"{name.replace('_', ' ').capitalize()}, counted by the router's core.",
                    labels=[label_name] if label_name else [],
                )
            families[name].add_metric([label] if label_name else [], value)
        yield from families.values()


class ResidencyCollector:
    """Shows how long contents stay in the workers' prefix caches, of the blocks they observe.

    Attributes:
        workers: by worker id the histograms of its last stats.
    """

    def __init__(self) -> None:
        self.workers: dict[str, tuple[ResidencyHistogram, ...]] = {}

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """All metrics, for the registry that calls it."""
        families: dict[str, HistogramMetricFamily] = {}
        bounds = [*(str(bound_ms / 1000) for bound_ms in RESIDENCY_BOUNDS_MS), "+Inf"]
        for worker, histograms in sorted(self.workers.items()):
            for one in histograms:
                if one.name not in families:
                    families[one.name] = HistogramMetricFamily(
                        f"disagg_cache_block_{one.name}_seconds", RESIDENCY[one.name],
                        labels=["worker"],
                    )  # fmt: skip
                buckets = list(zip(bounds, accumulate(one.counts), strict=True))
                families[one.name].add_metric([worker], buckets, one.sum_ms / 1000)
        yield from families.values()


class Metrics:
    """Counts what the dispatcher sees. A registry of its own: several routers per process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        reg = self.registry
        self._requests = Counter(
            "disagg_requests", "Ended requests by outcome.", ["outcome", "tenant"], registry=reg
        )
        self._live = Gauge("disagg_requests_live", "Requests in progress.", registry=reg)
        self._ttft = Histogram(
            "disagg_time_to_first_token_seconds",
            "From acceptance to the first token at the router.",
            buckets=TTFT_BUCKETS,
            registry=reg,
        )
        self._itl = Histogram(
            "disagg_inter_token_latency_seconds",
            "Between deliveries of one request, per token.",
            buckets=ITL_BUCKETS,
            registry=reg,
        )
        self._prompt_tokens = Counter(
            "disagg_prompt_tokens", "Prompt tokens.", ["tenant"], registry=reg
        )
        self._tokens = Counter(
            "disagg_generation_tokens", "Delivered tokens.", ["tenant"], registry=reg
        )
        self._tenants: set[str] = set()
        self._transfer_read = Histogram(
            "disagg_transfer_read_seconds",
            "Of a committed transfer, from its first READ posted to the last one done.",
            ["kind"],
            buckets=TRANSFER_BUCKETS,
            registry=reg,
        )
        self._transfer_exposed = Histogram(
            "disagg_transfer_exposed_seconds",
            "Of a committed transfer, from the end of its offers to the commit.",
            ["kind"],
            buckets=TRANSFER_BUCKETS,
            registry=reg,
        )
        self._task_failures = Counter(
            "disagg_router_task_failures",
            "Exceptions in the router's own tasks: tick, kv_events, session, http, admin, keys; "
            "each is a bug.",
            ["task"],
            registry=reg,
        )
        self._worker = Gauge(
            "disagg_worker", "A worker's last report.", ["worker", "name"], registry=reg
        )
        self._worker_counters = Gauge(
            "disagg_worker_count",
            "A worker's own monotonic counts; a new incarnation starts at 0.",
            ["worker", "name"],
            registry=reg,
        )
        self._residency = ResidencyCollector()
        reg.register(self._residency)

    def accepted(self, num_prompt_tokens: int, tenant: str) -> None:
        """A request went to the core."""
        self._live.inc()
        self._prompt_tokens.labels(self._label(tenant)).inc(num_prompt_tokens)

    def refused(self, outcome: str, tenant: str) -> None:
        """A request ended before it was accepted."""
        self._requests.labels(outcome, self._label(tenant)).inc()

    def ended(self, outcome: str, tenant: str) -> None:
        """An accepted request ended: ``stop``, ``length`` or an error's code."""
        self._live.dec()
        self._requests.labels(outcome, self._label(tenant)).inc()

    def delivered(self, num_tokens: int, waited_s: float, tenant: str, *, first: bool) -> None:
        """Count tokens delivered to a client."""
        self._tokens.labels(self._label(tenant)).inc(num_tokens)
        if first:
            self._ttft.observe(waited_s)
        elif num_tokens:
            self._itl.observe(waited_s / num_tokens)

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
            self._transfer_read.labels(report.kind).observe(report.read_ms / 1000)
            self._transfer_exposed.labels(report.kind).observe(report.exposed_ms / 1000)

    def task_failed(self, task: str) -> None:
        """Count an exception in one of the router's own tasks."""
        self._task_failures.labels(task).inc()

    def worker_stats(self, worker: Incarnation, stats: WorkerStats) -> None:
        """A worker's load and counters."""
        for name in GAUGES:
            self._worker.labels(worker.worker_id, name).set(float(getattr(stats, name)))
        for name, value in stats.counters:
            self._worker_counters.labels(worker.worker_id, name).set(value)
        known = (one for one in stats.residency if one.name in RESIDENCY)
        self._residency.workers[worker.worker_id] = tuple(known)

    def worker_left(self, worker: Incarnation) -> None:
        """Forget a worker's gauges, so that a dead one does not look alive."""
        self._worker.remove_by_labels({"worker": worker.worker_id})
        self._worker_counters.remove_by_labels({"worker": worker.worker_id})
        self._residency.workers.pop(worker.worker_id, None)

    def show_core(
        self, counters: Mapping[tuple[str, str], int], num_waiting: Callable[[], int]
    ) -> None:
        """Include the core's counters and its queue, read at every scrape."""
        self.registry.register(CoreCollector(counters))
        waiting = Gauge(
            "disagg_requests_waiting",
            "Requests that wait at the router for room at a worker.",
            registry=self.registry,
        )
        waiting.set_function(num_waiting)

    def text(self) -> bytes:
        """All metrics in Prometheus' exposition format."""
        return generate_latest(self.registry)
