"""Prometheus series of the revisions that are served side by side."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from disagg.routing.revisions import RevisionView


class RevisionCollector:
    """Shows every revision that has a worker or a weight, read at every scrape."""

    def __init__(self, views: Callable[[], Sequence[RevisionView]]) -> None:
        self._views = views

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """All metrics, for the registry that calls it."""
        views = self._views()
        requests = CounterMetricFamily(
            "disagg_revision_requests", "Requests let in for a revision.", labels=["revision"]
        )
        for view in views:
            requests.add_metric([view.name], view.num_requests)
        yield requests
        for name, text, figure in (
            ("weight", "Part of the new requests, relative to the others.", "weight"),
            ("workers_ready", "Workers that can take requests.", "num_ready"),
            ("requests_running", "Requests at its workers.", "num_running"),
            ("requests_waiting", "Requests that wait for room at its workers.", "num_waiting"),
        ):
            gauge = GaugeMetricFamily(f"disagg_revision_{name}", text, labels=["revision"])
            for view in views:
                gauge.add_metric([view.name], getattr(view, figure))
            yield gauge
