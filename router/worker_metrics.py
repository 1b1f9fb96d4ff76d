"""Prometheus series of the workers, from the stats that each of them reports.

A worker counts by flat names; what a name says (a cause, a tier, microseconds) becomes labels and
base units here. Every name that the code counts under stands in a table of this file.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from disagg.messages.stats import RESIDENCY_BOUNDS_MS, WorkerStats
from disagg.router.vllm_metrics import WORKER_ALIASES

PREFIX = "disagg_worker_"

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
    "stalled": "1 while its step takes longer than scheduling.step_slow_ms.",
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
_BUCKETS = [*(f',le="{bound_ms / 1000}"' for bound_ms in RESIDENCY_BOUNDS_MS), ',le="+Inf"']
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
NAMES_MAX = 4096
"""Of workers' counts, whose series are found out once."""


@dataclass(frozen=True, slots=True)
class CounterSeries:
    """Where a worker's count is shown."""

    name: str
    """Of the metric, without ``_total``."""
    help: str
    more_labels: str = ""
    """Besides the worker's, as they are appended to those."""
    scale: float = 1.0


@lru_cache(NAMES_MAX)
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
    more = f",{_labels(**dict(label))}" if label else ""
    if name.endswith("_us"):
        return CounterSeries(PREFIX + name[:-3] + "_seconds", text, more, 1e-6)
    return CounterSeries(PREFIX + name, text, more, 1)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of all workers in Prometheus' text format."""

    name: str
    """Without ``_total``."""
    type: str
    help: str
    lines: Iterator[str]
    """Made as they are asked for."""

    @property
    def head(self) -> str:
        """What stands before its lines."""
        name = self.name + "_total" * (self.type == "counter")
        return f"# HELP {name} {self.help}\n# TYPE {name} {self.type}\n"


class _Shown(NamedTuple):
    """A worker, with its labels by this project's and by vLLM's names."""

    labels: str
    engine: str
    stats: WorkerStats


_Row = tuple[_Shown, str, str, float]
"""A worker, what its metric's name ends with, labels more than its own, the value."""


class WorkerMetrics:
    """Shows what workers reported last; of a worker that left nothing.

    As text, line by line: a fleet has a hundred lines per worker, and prometheus_client's own take
    ten times as long, 1.5 s of a thousand workers.

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

    def families(self) -> Iterator[Family]:
        """All metrics of this moment, those with vLLM's names too, each with a line at least."""
        shown = [
            _Shown(
                _labels(model_name=self._model_name, role=role, worker=worker),
                _labels(engine=worker, model_name=self._model_name, role=role),
                stats,
            )
            for worker, (role, stats) in sorted(self._reports.items())
        ]
        if shown:
            yield from _gauges(shown)
            yield from _counters(shown)
            yield from _residency(shown)


def _gauges(shown: Sequence[_Shown]) -> Iterator[Family]:
    for name, text in GAUGES.items():
        rows = [(one, "", "", int(getattr(one.stats, name))) for one in shown]
        yield from _named(PREFIX + name, "gauge", text, rows)
    held = [
        (one, "", "", 1 - one.stats.num_blocks_free / max(1, one.stats.num_blocks_usable))
        for one in shown
    ]
    text = "Share of the KV blocks that are held."
    yield from _named(PREFIX + "kv_cache_usage_ratio", "gauge", text, held)


def _counters(shown: Sequence[_Shown]) -> Iterator[Family]:
    families: dict[str, tuple[str, list[_Row]]] = {}
    for one in shown:
        for counted, value in one.stats.counters:
            series = series_of(counted)
            _, rows = families.setdefault(series.name, (series.help, []))
            rows.append((one, "_total", series.more_labels, value * series.scale))
    for name, (text, rows) in families.items():
        yield from _named(name, "counter", text, rows)


def _residency(shown: Sequence[_Shown]) -> Iterator[Family]:
    for name, text in RESIDENCY.items():
        rows: list[_Row] = []
        for one in shown:
            for found in one.stats.residency:
                if found.name == name:
                    counts = list(accumulate(found.counts))
                    buckets = zip(_BUCKETS, counts, strict=True)
                    rows += [(one, "_bucket", bucket, count) for bucket, count in buckets]
                    rows.append((one, "_count", "", counts[-1]))
                    rows.append((one, "_sum", "", found.sum_ms / 1000))
        if rows:
            yield from _named(f"disagg_cache_block_{name}_seconds", "histogram", text, rows)


def _named(name: str, kind: str, text: str, rows: Sequence[_Row]) -> Iterator[Family]:
    """The metric, and the same by vLLM's name if it has one."""
    lines = (f"{name}{end}{{{one.labels}{more}}} {value}\n" for one, end, more, value in rows)
    yield Family(name, kind, text, lines)
    if name in WORKER_ALIASES:
        alias = WORKER_ALIASES[name]
        lines = (f"{alias}{end}{{{one.engine}{more}}} {value}\n" for one, end, more, value in rows)
        yield Family(alias, kind, f"As vLLM's; see {name}.", lines)


def _labels(**labels: str) -> str:
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
