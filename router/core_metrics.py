"""Prometheus series of the decisions: what the router's core counts."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily

PREFIX = "disagg_routing_"
PLAIN = {
    "kv_event_gaps": "KV events of workers that were missing; a snapshot was taken.",
    "late_messages": "Messages of workers for requests or plans that were over.",
    "poison": "Requests refused because workers were lost under them again and again.",
    "prefill_uncached_common_tokens": "Tokens computed that full attention had cached, "
    "and windows or states had not.",
    "protocol_errors": "Tokens of workers that contradicted others, or reports out of order.",
    "requests": "Choices that were accepted.",
    "tokens": "Tokens that were handed on, once each.",
}
LABELLED = {
    "cache_resets": ("outcome", "Resets of all prefix caches."),
    "full_bytes": ("kind", "Bytes of hand-overs if every block had been moved, by kind of group."),
    "plans": ("kind", "Plans, by whether one worker does all or a prefill is handed over."),
    "prefill_tokens": ("source", "Prompt tokens that workers prefilled, in all plans."),
    "prefix_pulled_bytes": ("kind", "Bytes of prefix pulls, by kind of group."),
    "prefix_pulls": ("outcome", "Prefix pulls, committed or by why they were not."),
    "pulled_bytes": ("kind", "Bytes of hand-overs, by kind of group."),
    "registrations_refused": ("cause", "Registrations refused, by the error's code."),
    "replans": ("cause", "Plans that were given up for another."),
    "requests_ended": ("outcome", "Choices that have ended."),
    "requests_refused": ("cause", "Choices refused by the core."),
    "workers_lost": ("cause", "Lives of workers that were lost."),
}
"""By what the label of a count says, and what it counts."""


class CoreCollector:
    """Shows the core's own counters as ``disagg_routing_<name>_total``."""

    def __init__(self, model_name: str, counters: Mapping[tuple[str, str], int]) -> None:
        self._model_name = model_name
        self._counters = counters

    def collect(self) -> Iterator[CounterMetricFamily]:
        """All metrics, for the registry that calls it."""
        families: dict[str, CounterMetricFamily] = {}
        for (name, value_of_label), value in sorted(self._counters.items()):
            label, text = LABELLED.get(name, ("", PLAIN.get(name, "")))
            labels = [label] if label else []
            if name not in families:
                families[name] = CounterMetricFamily(
                    PREFIX + name, text, labels=["model_name", *labels]
                )
            more = [value_of_label] if label else []
            families[name].add_metric([self._model_name, *more], value)
        yield from families.values()
