"""Who came lately stands for who will come: how many, how short, how urgent."""

import pytest

from disagg.routing.estimates.arrivals import (
    ARRIVALS_MAX,
    ARRIVALS_MIN,
    SPAN_MS_MIN,
    URGENCY_MAX,
    Arrivals,
)


def came(num: int, compute_ms: float = 10.0, slo_ttft_ms: int = 0, every_ms: int = 100) -> Arrivals:
    arrivals = Arrivals()
    for number in range(num):
        arrivals.add(number * every_ms, compute_ms, slo_ttft_ms)
    return arrivals


def test_requests_that_are_much_shorter_count_by_their_rate() -> None:
    arrivals = came(20)
    assert arrivals.newcomers(2_000, 0).shorter_per_ms(40.0) == pytest.approx(20 / 2_000)
    assert arrivals.newcomers(4_000, 0).shorter_per_ms(40.0) == pytest.approx(20 / 4_000), (
        "nobody comes"
    )
    assert arrivals.newcomers(2_000, 0).shorter_per_ms(20.0) == 0, (
        "about as long: one waits for the other"
    )


def test_those_are_counted_who_are_shorter_than_each() -> None:
    arrivals = Arrivals()
    for number, compute_ms in enumerate((30.0, 10.0, 50.0, 10.0, 20.0, 70.0, 10.0, 90.0)):
        arrivals.add(number * 100, compute_ms, 0)
    newcomers = arrivals.newcomers(2_000, 0)
    for compute_ms, num in ((20.0, 0), (20.1, 3), (41.0, 4), (200.0, 8)):
        assert newcomers.shorter_per_ms(compute_ms) == pytest.approx(num / 2_000), compute_ms


def test_few_and_bursts_are_no_rate() -> None:
    assert came(ARRIVALS_MIN - 1).newcomers(10_000, 0).shorter_per_ms(40.0) == 0
    assert came(ARRIVALS_MIN).newcomers(10_000, 0).shorter_per_ms(40.0) > 0, "control"
    at_once = came(30, every_ms=0)
    assert at_once.newcomers(0, 0).shorter_per_ms(40.0) == 30 / SPAN_MS_MIN


def test_only_the_last_ones_count() -> None:
    arrivals = came(30)
    for number in range(ARRIVALS_MAX):
        arrivals.add(3_000 + number * 100, 100.0, 0)
    assert arrivals.newcomers(10_000, 0).shorter_per_ms(40.0) == 0


def test_a_tighter_bound_counts_more_up_to_a_limit() -> None:
    per_ms = 20 / 2_000
    for theirs, mine, times in (
        (100, 400, 4),
        (400, 100, 0.25),
        (1, 60_000, URGENCY_MAX),
        (0, 400, 1),
        (400, 0, 1),
    ):
        found = came(20, slo_ttft_ms=theirs).newcomers(2_000, mine).shorter_per_ms(40.0)
        assert found == pytest.approx(times * per_ms), (theirs, mine)
