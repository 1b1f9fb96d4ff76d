"""The benchmark of predictions: errors by request, disturbed ones, and the world it runs."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.policy.__main__ import SYSTEMS
from benchmarks.policy.traces import MIXES, make_trace
from benchmarks.simulation.__main__ import compare, write
from benchmarks.simulation.figures import KEPT_MIN, Pair, report
from benchmarks.simulation.machine_watch import MachineWatch
from benchmarks.simulation.measured import Seen
from benchmarks.simulation.predicted import plan_of, predict
from disagg.simulation.curves import Surface
from tests.unit.simulation.fleets import curves

ALWAYS = next(one for one in SYSTEMS if one.policy == "prefix_then_load")
OURS = next(one for one in SYSTEMS if one.policy == "estimated")


def test_errors_are_shares_of_what_was_measured() -> None:
    assert Pair(100, 110).error == pytest.approx(0.1)
    assert Pair(100, 40).error == pytest.approx(0.6)
    assert Pair(100, None).error == 1


@pytest.mark.parametrize(
    ("pairs", "ok"),
    [
        ([Pair(100, 105)] * KEPT_MIN, True),
        ([Pair(100, 120)] * KEPT_MIN, False),
        ([Pair(100, 105)] * (KEPT_MIN - 1), False),
        ([], False),
    ],
)
def test_a_figure_needs_a_small_error_and_enough_requests(
    pairs: list[Pair], ok: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report("TTFT", pairs, 3, "a test") is ok
    line = json.loads(capsys.readouterr().out)
    assert line["ok"] is ok
    assert "3 more disturbed" in line["note"]
    if pairs:
        assert line["ratio"] == pytest.approx(0.1 / pairs[0].error, rel=0.01)


def test_what_others_take_is_what_is_not_ours() -> None:
    ours = 0.0
    with MachineWatch(lambda: ours) as machine:
        began_s = time.monotonic()
        while time.process_time() < 0.3 or time.monotonic() < began_s + 0.3:
            pass
        ended_s = time.monotonic()
    assert machine.others_share(began_s, ended_s) > 0, "this process was not said to be ours"


def seen() -> list[Seen]:
    trace = make_trace(MIXES[0], 2.0, 6, 1)
    return [
        Seen(one.arrival_s, one.tokens, (7,) * one.num_output_tokens, 1, 1, True, 0)
        for one in trace
    ]


def test_the_same_requests_are_predicted_by_rule_and_curves() -> None:
    assert plan_of(curves(), ALWAYS).roles == ("prefill", "decode")
    assert plan_of(curves(), OURS).roles == ("both", "both")
    found = predict(curves(), ALWAYS, seen())
    assert [one.num_tokens for one in found] == [len(one.answer) for one in seen()]
    assert all(one.handed_over and one.finished for one in found)
    twice = Surface(
        curves().decode.across,
        curves().decode.along,
        tuple(tuple(2 * ms for ms in row) for row in curves().decode.ms),
    )
    slow = predict(replace(curves(), decode=twice), ALWAYS, seen())
    for one, other in zip(found, slow, strict=True):
        assert (other.tpot_ms or 0) > 1.5 * (one.tpot_ms or 0), "control: other curves"


def test_prompts_are_the_requests_own_tokens() -> None:
    """A prompt that was asked before is cached; one of the same length is not."""
    first = seen()[0]
    later = replace(first, sent_s=20.0)
    other = replace(later, sent_s=40.0, prompt=tuple(one + 1 for one in first.prompt))
    cached = [one.num_cached for one in predict(curves(), OURS, [first, later, other])]
    assert cached[0] == cached[2] == 0
    assert cached[1] > len(first.prompt) // 2


def test_requests_beside_others_are_left_out_and_the_record_has_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = predict(curves(), OURS, seen())
    as_predicted = [
        replace(one, ttft_ms=other.ttft_ms or 0, tpot_ms=other.tpot_ms or 0)
        for one, other in zip(seen(), outcomes, strict=True)
    ]
    disturbed = replace(as_predicted[0], ttft_ms=1e6, others_share=0.5)
    assert compare("chat", curves(), OURS, [[disturbed, *as_predicted[1:]]])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == ["chat: TTFT", "chat: TPOT"]
    assert all(line["ours"] == 0 and "1 more disturbed" in line["note"] for line in lines)
    slow = [replace(one, ttft_ms=2 * one.ttft_ms) for one in as_predicted]
    assert not compare("chat", curves(), OURS, [slow]), "control"
    file = tmp_path / "curves.json"
    file.write_text("{}")
    write(tmp_path / "record", file, {("chat", OURS): [as_predicted]})
    assert len(json.loads((tmp_path / "record").read_text())["runs"][0]["requests"]) == 6
