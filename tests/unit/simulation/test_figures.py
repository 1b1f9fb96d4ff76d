"""Percentiles, goodput, ratios."""

from dataclasses import replace

import pytest

from disagg.errors import ConfigError, InvariantViolation
from disagg.simulation.comparison import Comparison, Trace, best_ratio, splits
from disagg.simulation.figures import Slos, percentile, summarise
from disagg.simulation.mixes import Lengths, make_trace
from disagg.simulation.prompts import TraceRequest
from disagg.simulation.virtual_time import VirtualTime
from disagg.simulation.world import Outcome
from tests.unit.simulation.fleets import fleet


def outcome(ttft_ms: float | None, tpot_ms: float = 10, error: str = "") -> Outcome:
    request = TraceRequest(100, 50, 11, (0,))
    if ttft_ms is None:
        return Outcome(request, end_ms=200, error=error)
    first = 100 + ttft_ms
    return Outcome(request, first, first + 10 * tpot_ms, 11, error, num_cached=25)


def test_goodput_counts_what_keeps_both() -> None:
    outcomes = [
        outcome(50),
        outcome(500),  # too late
        outcome(50, tpot_ms=90),  # too slow
        outcome(50, error="expired"),  # not whole
        outcome(None, error="capacity_exceeded"),
    ]
    found = summarise(
        outcomes, Slos(100, 50), policy="local", workers=(1, 2, 0), asked_rate=2, lasts_s=2.0
    )
    assert (found.goodput, found.kept_share, found.rate) == (0.5, 0.2, 2.5)
    assert found.errors == {"capacity_exceeded": 1, "expired": 1}
    assert found.ttft_ms == (50, 500, 500)
    assert found.cached_share == 100 / 250
    assert found.as_json()["tpot_ms"] == {"p50": 10, "p90": 90, "p99": 90}


def test_who_was_handed_over_and_had_no_token_was_planned_too() -> None:
    given_up = replace(outcome(None, error="timeout"), planned=True, handed_over=True)
    alone = replace(outcome(50), planned=True)
    found = summarise(
        [given_up, alone, outcome(None, error="capacity_exceeded")],
        Slos(100, 50),
        policy="p",
        workers=(1, 1, 0),
        asked_rate=2,
        lasts_s=1,
    )
    assert found.handed_over_share == 0.5


def test_nothing_came() -> None:
    found = summarise(
        [outcome(None, error="x")],
        Slos(1, 1),
        policy="p",
        workers=(1, 1, 0),
        asked_rate=2,
        lasts_s=1,
    )
    assert (found.ttft_ms, found.tpot_ms, found.goodput) == (None, None, 0)


def test_percentiles() -> None:
    assert [percentile(range(1, 101), p) for p in (50, 90, 99)] == [50, 90, 99]
    assert percentile([3.0], 99) == 3


def test_splits() -> None:
    assert splits(4) == [(1, 3), (2, 2), (3, 1)]
    many = splits(1_000)
    assert many[0] == (100, 900)
    assert many[-1] == (900, 100)
    assert all(prefill + decode == 1_000 for prefill, decode in many)
    with pytest.raises(ConfigError):
        splits(1)


def test_the_best_ratio_follows_the_load() -> None:
    """Long prompts and short answers want prefill workers; the other way round, decode workers."""
    best = {}
    for name, num_prompt, num_answer in (("prompts", 3_000, 4), ("answers", 60, 300)):
        ids = iter(range(100_000))
        trace = [
            TraceRequest(
                120.0 * n,
                num_prompt,
                num_answer,
                tuple(next(ids) for _ in range(-(-num_prompt // 512))),
            )
            for n in range(60)
        ]
        plans = [fleet().with_ratio(*split) for split in splits(4)]
        comparison = Comparison(
            plans,
            [1.0],
            lambda rate, trace=trace: (trace, 7.2),  # type: ignore[misc]
            Slos(2_000, 13),
            0,
        )
        figures = [comparison.figures(run) for run in comparison.runs]
        (one,) = best_ratio(figures).values()
        best[name] = one.num_prefill
    assert best["prompts"] > best["answers"]


def test_rates_that_bring_equally_many_requests_stay_apart() -> None:
    trace = [TraceRequest(0, 60, 4, (0,))]
    comparison = Comparison([fleet()], [1.0, 1.1], lambda rate: (trace, 1.0), Slos(2_000, 50), 0)
    best = best_ratio([comparison.figures(run) for run in comparison.runs])
    assert [(rate, one.as_json()["asked_rate"], one.rate) for (_, rate), one in best.items()] == [
        (1.0, 1.0, 1.0),
        (1.1, 1.1, 1.0),
    ]


def test_all_policies_get_the_same_requests() -> None:
    trace = make_trace("short-chat", 3, 4, Lengths(4_096, 0.1), 0)
    plans = [fleet().with_policy(name) for name in ("local", "prefix_then_load")]
    comparison = Comparison(plans, [3.0], lambda rate: (trace, 4.0), Slos(1_000, 100), 0)
    found = [comparison.figures(run) for run in comparison.runs]
    assert [one.policy for one in found] == ["local", "prefix_then_load"]
    assert {one.num_requests for one in found} == {len(trace)}


def test_a_rates_requests_are_made_once() -> None:
    made: list[float] = []

    def trace_at(rate: float) -> Trace:
        made.append(rate)
        return make_trace("short-chat", rate, 4, Lengths(4_096, 0.1), 0), 4.0

    plans = [fleet().with_policy(name) for name in ("local", "prefix_then_load")]
    comparison = Comparison(plans, [3.0, 1.0], trace_at, Slos(1_000, 100), 0)
    found = [comparison.figures(run) for run in comparison.runs]
    assert made == [3.0, 1.0]
    # Two fleets each, and of another comparison, which has seen one rate only: the same.
    for run, figures in zip(comparison.runs, found, strict=True):
        alone = Comparison(plans, [run.rate], trace_at, Slos(1_000, 100), 0)
        assert alone.figures(run) == figures
    assert made == [3.0, 1.0, 3.0, 3.0, 1.0, 1.0]


def test_virtual_time_keeps_the_order() -> None:
    time, seen = VirtualTime(), list[str]()
    time.after(5, lambda: seen.append("later"))
    time.after(1, lambda: time.after(4, lambda: seen.append("last")))
    time.after(1, lambda: seen.append("first"))
    while time.advance():
        pass
    assert seen == ["first", "later", "last"]
    assert time.now_ms == 5
    with pytest.raises(InvariantViolation):
        time.after(-1, lambda: None)
