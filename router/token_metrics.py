"""Prometheus series in which every token counts."""

from collections.abc import Iterator

from prometheus_client import Metric

from disagg.router.plain_metrics import Count, PlainCounter, PlainHistogram

ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)


class TokenMetrics:
    """Tokens delivered, by tenant, and the times between them."""

    def __init__(self, model_name: str) -> None:
        self._delivered = PlainCounter(
            "disagg_generation_tokens", "Delivered tokens.", model_name, ["tenant"]
        )
        self._waits = PlainHistogram(
            "disagg_inter_token_latency_seconds",
            "Between deliveries of one choice, per token.",
            model_name,
            bounds=ITL_BUCKETS,
        )
        self._wait = self._waits.of()

    def delivered(self, tenant: str) -> Count:
        """What a tenant's tokens are to be added to."""
        return self._delivered.of(tenant)

    def waited(self, num_tokens: int, waited_s: float) -> None:
        """So long passed since the delivery before of the same choice."""
        self._wait.observe(waited_s / num_tokens)

    def collect(self) -> Iterator[Metric]:
        """All metrics, for the registry that calls it."""
        yield from self._delivered.collect()
        yield from self._waits.collect()
