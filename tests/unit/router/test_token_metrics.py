"""What every token counts in shows what prometheus_client's own series would."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from disagg.router.token_metrics import ITL_BUCKETS, TokenMetrics

WAITS_S = st.sampled_from([*ITL_BUCKETS, 0.0]) | st.floats(0, 7)


def page(*collectors: Collector) -> list[str]:
    """The lines of a scrape, but for when a series was made."""
    registry = CollectorRegistry()
    for one in collectors:
        registry.register(one)
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


class Theirs:
    """The same of prometheus_client."""

    def __init__(self) -> None:
        self.tokens = Counter(
            "disagg_generation_tokens",
            "Delivered tokens.",
            ["model_name", "tenant"],
            registry=None,
        )
        self.waits = Histogram(
            "disagg_inter_token_latency_seconds",
            "Between deliveries of one choice, per token.",
            ["model_name"],
            buckets=ITL_BUCKETS,
            registry=None,
        )
        self.waits.labels("m")

    def collect(self) -> Iterable[Metric]:
        yield from self.tokens.collect()
        yield from self.waits.collect()


@given(
    st.lists(st.tuples(st.sampled_from(["", "alice", 'b"o\\b\n']), st.integers(1, 5), WAITS_S)),
)
def test_series_are_those_of_the_library(deliveries: list[tuple[str, int, float]]) -> None:
    ours, theirs = TokenMetrics("m"), Theirs()
    for tenant, num_tokens, waited_s in deliveries:
        ours.delivered(tenant).num += num_tokens
        theirs.tokens.labels("m", tenant).inc(num_tokens)
        ours.waited(num_tokens, waited_s)
        theirs.waits.labels("m").observe(waited_s / num_tokens)
    assert page(ours) == page(theirs)


def test_control_one_token_more_is_seen() -> None:
    ours, theirs = TokenMetrics("m"), Theirs()
    ours.delivered("").num += 2
    theirs.tokens.labels("m", "").inc(1)
    assert page(ours) != page(theirs)
