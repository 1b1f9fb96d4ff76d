"""Prometheus series of the workers, from the stats that each of them reports.

A worker counts by flat names; what a name says (a cause, a tier, microseconds) becomes labels and
base units here. Every name that the code counts under stands in a table of this file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from disagg.messages.session import RESIDENCY_BOUNDS_MS, WorkerStats

PREFIX = "disagg_worker_"
LABELS = ("worker", "role", "model_name")

GAUGES = {
    "num_waiting": "Sequences that wait for their turn, or for a hand-over.",
    "num_running": "Sequences that compute in steps.",
    "num_prefill_tokens_queued": "Prompt tokens that are still to be computed.",
    "num_blocks_usable": "KV blocks of the pool.",
    "num_blocks_free": "KV blocks without a holder; cached ones among them.",
    "num_leases": "Leases under which others read from here.",
    "num_reservations": "Hand-overs that memory is reserved for.",
    "num_inbound": "Transfers into this worker.",
    "num_blocks_quarantined": "KV blocks that a READ which stands still may yet write.",
    "ready": "1 if it takes requests.",
    "draining": "1 while it takes no new work and ends what it has.",
}
"""Fields of `WorkerStats`."""
COUNTERS = {
    "accepted_draft_tokens": "Drafted tokens that were right.",
    "checksum_mismatches": "KV blocks that came with another checksum than they were offered with.",
    "checksum_us": "Time of the thread that computes checksums.",
    "checksummed_blocks": "KV blocks whose checksum was computed.",
    "draft_tokens": "Tokens drafted.",
    "leases_expired": "Leases that stood still for too long.",
    "preemptions": "Sequences that lost their blocks while they ran.",
    "prefill_step_tokens": "Tokens of the steps whose time is in prefill_step_seconds.",
    "prefill_step_us": "Time of the steps that computed prompts.",
    "prefix_pulled_bytes": "Bytes read from other workers' prefix caches.",
    "prefix_pulls": "Prefixes requested of other workers.",
    "prefix_pulls_committed": "Prefixes pulled.",
    "prefix_pulls_skipped": "Planned pulls that were not worth a request any more.",
    "pulled_bytes": "Bytes read for hand-overs.",
    "requests_superseded": "Requests whose name a later one claimed, at whichever router.",
    "reservations_refused": "Reservations that a decode worker refused.",
    "sequences_kept": "Decodes whose KV was kept for another worker, as this one drained.",
    "take_overs": "Leases taken over from a decode worker that was lost.",
    "tier_events_missed": "Events of tiers that were not sent.",
    "tier_loaded_tokens": "Tokens loaded from tiers that the pool had not.",
    "tier_loads": "Prompts loaded from tiers.",
    "tier_loads_failed": "Loads of which something did not come.",
    "tier_prefetches": "Loads while a hand-over was waited for.",
    "tier_prefixes_loaded_to_lend": "Loads for another worker that pulls.",
    "tier_reads_given_up": "Reads of a tier that stood still.",
    "transfers_committed": "Hand-overs that were committed.",
    "transfers_drained": "Transfers that were given up, whose last READ has ended.",
    "transfers_recovered": "Transfers that went on after a failed READ.",
    "worker_id_claims": "Registrations of other processes under its id, which were refused.",
}
"""By the worker's own name; microseconds become seconds."""
BY_CAUSE = {
    "parts_ended": ("reason", "Parts of requests that ended unfinished."),
    "prefix_pulls_failed": ("cause", "Prefix pulls given up; the prefix was computed."),
    "transfers_failed": ("cause", "Hand-overs given up."),
}
"""The worker's names go on after these with a cause."""
BY_TIER = {
    "tier_blocks_missed": "Blocks of a tier that did not come whole, as the pool saw it.",
    "tier_blocks_read": "Blocks that came whole from a tier.",
    "tier_blocks_refused": "Blocks that a tier did not take.",
    "tier_blocks_written": "Blocks that a tier took.",
    "tier_evicted": "Blocks that a tier gave up to make room.",
    "tier_missed": "Blocks that a tier's own reads lacked.",
    "tier_read": "Blocks that a tier's own reads brought.",
    "tier_read_us": "Time of a tier's threads in reads.",
    "tier_not_written": "Blocks that a tier's own writes left out.",
    "tier_write_us": "Time of a tier's threads in writes.",
    "tier_written": "Blocks that a tier's own writes stored.",
}
"""They go on with the tier's name."""
TIER_EVENTS = "tier_events"
OTHERS = "other"
RESIDENCY = {
    "lifetime": "Of an observed block, from the caching of a content to its eviction.",
    "idle": "Of an observed block, from when its content was last found to its eviction.",
    "reuse_gap": "Of an observed block, between two times that its content was found.",
}
_TIER_NAME = re.compile(r"tier_(.+)_([^_]+)")
_BOUNDS = [*(str(bound_ms / 1000) for bound_ms in RESIDENCY_BOUNDS_MS), "+Inf"]


@dataclass(frozen=True, slots=True)
class CounterSeries:
    """Where a worker's count is shown."""

    name: str
    """Of the metric, without ``_total``."""
    help: str
    label: tuple[tuple[str, str], ...] = ()
    """Labels besides `LABELS`, with their values."""
    scale: float = 1.0


def series_of(counted: str) -> CounterSeries:
    """The series of one of a worker's counts, by its name there."""
    if counted in COUNTERS:
        return _series(counted, COUNTERS[counted])
    for start, (label, text) in BY_CAUSE.items():
        if counted.startswith(start + "_"):
            return _series(start, text, (label, counted.removeprefix(start + "_")))
    for start in sorted(BY_TIER, key=len, reverse=True):
        if counted.startswith(start + "_"):
            return _series(start, BY_TIER[start], ("tier", counted.removeprefix(start + "_")))
    if found := _TIER_NAME.fullmatch(counted):
        text = "What else happened at a tier, by what it was."
        return _series(TIER_EVENTS, text, ("tier", found[2]), ("event", found[1]))
    return _series(OTHERS, "Counts that this router has no name for.", ("name", counted))


def _series(name: str, text: str, *label: tuple[str, str]) -> CounterSeries:
    if name.endswith("_us"):
        return CounterSeries(PREFIX + name[:-3] + "_seconds", text, label, 1e-6)
    return CounterSeries(PREFIX + name, text, label)


class WorkerCollector:
    """Shows what workers reported last; of a worker that left nothing.

    A new life of a worker counts from 0 again, as Prometheus expects of a process that restarts.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._reports: dict[str, tuple[str, WorkerStats]] = {}

    def report(self, worker_id: str, role: str, stats: WorkerStats) -> None:
        """A worker's load and counts, instead of those before."""
        self._reports[worker_id] = role, stats

    def forget(self, worker_id: str) -> None:
        """Show nothing of a worker any more, so that a dead one does not look alive."""
        self._reports.pop(worker_id, None)

    def collect(self) -> Iterator[Metric]:
        """All metrics, for the registry that calls it."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._residency()

    def _labelled(self) -> Iterator[tuple[list[str], WorkerStats]]:
        for worker, (role, stats) in sorted(self._reports.items()):
            yield [worker, role, self._model_name], stats

    def _gauges(self) -> Iterator[Metric]:
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
            for labels, stats in self._labelled():
                gauge.add_metric(labels, float(getattr(stats, name)))
            yield gauge
        usage = GaugeMetricFamily(
            PREFIX + "kv_cache_usage_ratio", "Share of the KV blocks that are held.", labels=LABELS
        )
        for labels, stats in self._labelled():
            held = stats.num_blocks_usable - stats.num_blocks_free
            usage.add_metric(labels, held / max(1, stats.num_blocks_usable))
        yield usage

    def _counters(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for labels, stats in self._labelled():
            for counted, value in stats.counters:
                series = series_of(counted)
                if series.name not in families:
                    names = [*LABELS, *(name for name, _ in series.label)]
                    families[series.name] = CounterMetricFamily(
                        series.name, series.help, labels=names
                    )
                more = [value for _, value in series.label]
                families[series.name].add_metric([*labels, *more], value * series.scale)
        yield from families.values()

    def _residency(self) -> Iterator[Metric]:
        families: dict[str, HistogramMetricFamily] = {}
        for labels, stats in self._labelled():
            for one in stats.residency:
                if one.name not in RESIDENCY:
                    continue
                if one.name not in families:
                    families[one.name] = HistogramMetricFamily(
                        f"disagg_cache_block_{one.name}_seconds", RESIDENCY[one.name],
                        labels=LABELS,
                    )  # fmt: skip
                buckets = list(zip(_BOUNDS, accumulate(one.counts), strict=True))
                families[one.name].add_metric(labels, buckets, one.sum_ms / 1000)
        yield from families.values()
