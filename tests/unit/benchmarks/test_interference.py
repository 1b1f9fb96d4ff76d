"""The load of the interference benchmark, and what it counts."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from benchmarks.interference.figures import COLUMNS, METRICS, Measured, report, table
from benchmarks.interference.load import (
    NUM_LONG_OUTPUT_TOKENS,
    Load,
    Seen,
    percentile,
    plan_arrivals,
    run,
)

LOAD = Load(lasts_s=100.0, every_s=10.0)


def test_percentiles_are_samples() -> None:
    samples = [float(number) for number in range(1, 101)]
    assert percentile(samples, 50) == 50
    assert percentile(samples[::-1], 99) == 99
    assert percentile([*samples, 1_000.0], 99) == 100
    assert percentile([3.0], 1) == percentile([3.0], 99) == 3.0


def test_arrivals_do_not_depend_on_answers() -> None:
    arrivals = plan_arrivals(LOAD, seed=1)
    assert arrivals == plan_arrivals(LOAD, seed=1)
    assert arrivals != plan_arrivals(LOAD, seed=2)
    moments = [arrival.at_s for arrival in arrivals]
    assert moments[0] == 5.0
    assert moments[-1] < LOAD.lasts_s <= moments[-1] + 15.0
    assert all(5.0 <= after - before <= 15.0 for before, after in itertools.pairwise(moments))
    assert all(4_000 <= arrival.prompt_tokens <= 8_000 for arrival in arrivals)
    assert plan_arrivals(Load(100.0, every_s=0.0), seed=1) == []


def test_a_gap_counts_where_it_began() -> None:
    seen = Seen(Load(lasts_s=10.0, every_s=0.0))
    seen.add_running(1.0, [1.5, 2.0, 4.0])
    seen.add_running(8.0, [9.0, 9.5, 20.0, 20.5])  # held up beyond the end, and then not any more
    seen.add_running(9.0, [11.0, 12.0])
    assert seen.gaps_ms == [500.0, 2_000.0, 500.0, 10_500.0]
    assert seen.first_ms == [500.0, 1_000.0, 2_000.0]
    assert (seen.num_tokens, seen.tokens_per_s) == (5, 0.5)


def test_all_systems_are_asked_the_same_and_everything_is_awaited() -> None:
    load = Load(0.5, 0.2, num_streams=2, prompt_tokens=3, num_output_tokens=4, long_tokens=(7, 9))
    asked: list[list[dict[str, Any]]] = []

    async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[float]:
        asked[-1].append(body)
        loop = asyncio.get_running_loop()
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0)
            yield loop.time()  # the same clock as time.monotonic

    for _ in range(2):
        asked.append([])
        seen = asyncio.run(run(load, 1, 100, ask))
        long = [body for body in asked[-1] if body["max_tokens"] == NUM_LONG_OUTPUT_TOKENS]
        assert len(long) == len(plan_arrivals(load, 1)) == len(seen.long_first_ms)
        assert seen.wall_s >= load.lasts_s
        assert min(seen.long_first_ms) > 0
        assert len(seen.first_ms) == len(asked[-1]) - len(long)
    one, other = ([body["prompt"] for body in bodies] for bodies in asked)
    short = [[prompt for prompt in prompts if len(prompt) == 3] for prompts in (one, other)]
    assert short[0][:2] == short[1][:2]  # how many follow, the answers decide
    assert short[0][0] != short[0][1]
    assert sorted(p for p in one if len(p) > 3) == sorted(p for p in other if len(p) > 3)


def _measured(factor: float) -> Measured:
    measured = Measured()
    for _ in range(2):
        calm, disturbed = Seen(LOAD), Seen(LOAD)
        for seen in (calm, disturbed):
            seen.add_running(0.0, [factor * moment for moment in (1.0, 1.5, 2.0)])
        disturbed.long_first_ms.append(2_000.0 * factor)
        measured.add(calm, disturbed, cpu_s=10.0)
    return measured


def test_both_sides_stand_in_figures_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {"1P1D": _measured(1.0), "one": _measured(2.0)}
    report("1P1D", "one", measured, "a load")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == [f"1P1D beside one: {name}" for name in METRICS]
    by_name = {line["name"].split(": ")[1]: line for line in lines}
    assert by_name["ITL p99"]["ours"] == 500.0
    assert by_name["ITL p99"]["ratio"] == 2.0
    assert by_name["TTFT of a long prompt, max"]["peer"] == 4_000.0
    head, rule, *rows = table(measured).splitlines()
    assert {line.count("|") for line in (head, rule, *rows)} == {len(COLUMNS) + 1}
    assert rows[1] == (
        "| one | 1,000 / 1,000 | 0 | 1,000 / 1,000 / 1,000 | 0 | 2.0 / 2.0 | 4.0 / 4.0 | 10 |"
    )
