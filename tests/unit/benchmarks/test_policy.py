"""The benchmark of policies: its traces, what it counts, and its bounds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.policy.__main__ import Run, read_record
from benchmarks.policy.figures import (
    ALWAYS,
    COLOCATED,
    OURS,
    Cell,
    Round,
    Served,
    Slo,
    best_other,
    goodput,
    losses,
    report,
    request_ttfts,
    table,
    ttft_ratios,
)
from benchmarks.policy.systems import SYSTEMS
from benchmarks.policy.traces import (
    CODE,
    MIXES,
    TURN_GAP_S,
    TURNS,
    Mix,
    make_trace,
    whole_prompts,
)
from benchmarks.policy.virtual import VirtualFleet
from disagg.routing.policy import estimated
from tests.unit.simulation.fleets import curves

CELL = Cell("short chat", 0.5, rate=2.0, num_requests=4)
SLOS = {"chat": Slo(100, 20)}


def served(*times: tuple[float, float]) -> Round:
    return Round(tuple(Served("chat", ttft, tpot, False) for ttft, tpot in times), 1.0, 2.0)


GOOD = served((50, 10), (100, 20), (90, 5), (10, 1))
LATE = served((101, 10), (100, 20), (300, 5), (10, 20.1))


def test_goodput_counts_requests_that_keep_both_bounds() -> None:
    assert goodput(GOOD, CELL, SLOS) == 4 / 2.0
    assert goodput(LATE, CELL, SLOS) == 1 / 2.0, "late, late, and slow"
    assert goodput(LATE, CELL, {"chat": Slo(1_000, 1_000)}) == 2.0, "control: other bounds"


def test_a_request_is_compared_with_the_least_that_another_rule_gave_it() -> None:
    rounds = {
        "one": [served((100, 1), (10, 1)), served((300, 1), (30, 1)), served((200, 1), (20, 1))],
        "two": [served((50, 1), (80, 1))] * 3,
        OURS: [served((100, 1), (30, 1))] * 3,
    }
    assert request_ttfts(rounds["one"]) == [200, 20], "medians, request by request"
    assert ttft_ratios(rounds, OURS) == [100 / 50, 30 / 20]
    assert ttft_ratios(rounds, "two") == [50 / 200, 80 / 20], "neither itself nor ours"
    means = sum(request_ttfts(rounds[OURS])) / sum(request_ttfts(rounds["two"]))
    assert means == 1.0, "control: the means do not show it"


@pytest.mark.parametrize(
    ("ours", "is_mixed", "ok"),
    [(GOOD, True, True), (GOOD, False, True), (LATE, False, False)],
)
def test_the_best_other_rule_is_the_target(
    ours: Round, is_mixed: bool, ok: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = {"poor": [LATE], "slow": [served(*[(99, 20)] * 4)], "good": [GOOD], OURS: [ours]}
    assert best_other(CELL, rounds, SLOS) == "good", "of two with all kept the one of least TTFT"
    assert report(CELL, rounds, SLOS, is_mixed=is_mixed, note="test") is ok
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["target"] for line in lines] == [1.0 if is_mixed else 0.95, None, None, 1.0]
    assert lines[-1]["ours"] == pytest.approx(max(ttft_ratios(rounds, OURS)), abs=1e-3)
    text = table([(CELL, rounds)], SLOS)
    assert text.count("\n") == 1 + len(rounds)


def test_the_table_of_losses_names_what_pd_loses() -> None:
    cell, slos = Cell("m", 0.5, 1.0, 2), {"chat": Slo(100, 20)}
    alone, apart = served((10, 10), (10, 10)), served((200, 5), (20, 5))
    rounds = {COLOCATED: [alone], ALWAYS: [apart]}
    assert "| 0.50 | 11.00 | 0.50 | goodput, TTFT |" in losses([(cell, rounds)], slos)
    assert "| 1.00 | 1.00 | 1.00 | nothing |" in losses(
        [(cell, {COLOCATED: [alone], ALWAYS: [alone]})], slos
    )


def test_one_request_that_waits_three_times_as_long_misses_the_target() -> None:
    slow = served((50, 10), (100, 20), (90, 5), (31, 1))
    assert not report(CELL, {"good": [GOOD], OURS: [slow]}, SLOS, is_mixed=False, note="test")


@pytest.mark.parametrize("mix", MIXES)
def test_a_trace_is_a_function_of_its_seed(mix: Mix) -> None:
    trace = make_trace(mix, 4.0, 60, seed=3)
    assert trace == make_trace(mix, 4.0, 60, seed=3)
    assert trace != make_trace(mix, 4.0, 60, seed=4)
    moments = [one.arrival_s for one in trace]
    assert moments == sorted(moments)
    assert {one.kind for one in trace} == {name for phase in mix.phases for name in phase}


def test_prompts_share_what_they_should() -> None:
    code = make_trace(MIXES[2], 4.0, 60, seed=1)
    begins = {one.tokens[: CODE.shared_tokens[0]] for one in code}
    assert len(begins) == CODE.num_shared
    turns = make_trace(MIXES[3], 4.0, 60, seed=1)
    answers = {number: [7] * one.num_output_tokens for number, one in enumerate(turns)}
    whole = whole_prompts(turns, answers)
    followers = [number for number, one in enumerate(turns) if one.follows is not None]
    assert len(followers) > 20
    for number in followers:
        before = turns[number].follows
        assert before is not None
        assert whole[number][1][: len(whole[before][1]) + 1] == [*whole[before][1], 7]
        assert turns[number].arrival_s >= turns[before].arrival_s + TURN_GAP_S
    taken = [turns[number].follows for number in followers]
    assert len(set(taken)) == len(taken), "nobody says two things after one answer"
    depth: dict[int, int] = {}
    for number, one in enumerate(turns):
        depth[number] = 1 if one.follows is None else depth[one.follows] + 1
    assert 2 < max(depth.values()) <= TURNS.num_turns


def test_a_record_is_gone_on_with(tmp_path: Path) -> None:
    assert read_record(None) is None
    assert read_record(tmp_path / "none") is None
    run = Run({"chat": Slo(100, 20)}, {"short chat": 10.0})
    cell = replace(run.cell("short chat", 0.5), num_requests=2)
    lines = [
        {"slos": {"chat": {"ttft_ms": 100, "tpot_ms": 20}}, "capacities": {"short chat": 10.0}}
    ]
    for name in ("1", "2"):
        for ttft_ms in (10.0, 20.0):
            one = {"kind": "chat", "ttft_ms": ttft_ms, "tpot_ms": 1.0, "handed_over": True}
            about = {"mix": cell.mix, "share": cell.share, "rate": cell.rate}
            about |= {"num_requests": cell.num_requests}
            lines.append(
                {"cell": about, "system": OURS, "round": name, "cpu_s": 1.0, "wall_s": 2.0} | one
            )
    path = tmp_path / "record"
    cut_off = json.dumps({**lines[-1], "round": "3"})
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + f"{cut_off}\n\n{cut_off[:-9]}"
    )
    found = read_record(path)
    assert found is not None
    assert replace(found.cell("short chat", 0.5), num_requests=2) == cell
    assert [found.has(cell, OURS, number) for number in range(3)] == [True, True, False]
    assert not found.has(cell, COLOCATED, 0)
    assert [[one.ttft_ms for one in seen.served] for seen in found.seen[cell][OURS]] == [
        [10.0, 20.0]
    ] * 2


def test_rules_are_played_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And who may wait by choice keeps more bounds where long prompts spoil answers."""
    fleet = VirtualFleet(curves())
    slos = fleet.slos()
    assert slos["document"].ttft_ms > slos["chat"].ttft_ms > 0
    cell = Cell("long documents", 0.6, 0.6 * fleet.capacity("long documents"), 20)
    played = fleet.play(SYSTEMS[-1], cell, slos, 1)
    assert played == fleet.play(SYSTEMS[-1], cell, slos, 1), "the same in every run"
    assert played != fleet.play(SYSTEMS[-1], cell, slos, 2)
    assert played != fleet.play(SYSTEMS[0], cell, slos, 1)
    monkeypatch.setattr(estimated, "HOLD_MS_MAX", 0)
    hasty = fleet.play(SYSTEMS[-1], cell, slos, 1)
    kept = [sum(one.keeps(slos[one.kind]) for one in each.served) for each in (hasty, played)]
    assert kept[0] < kept[1], kept
