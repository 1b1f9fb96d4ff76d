"""The benchmark of predictions: errors by request, what is thrown away, and the world it runs."""

import json
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks.policy.fleet import System
from benchmarks.policy.switched import SWITCHED
from benchmarks.policy.traces import MIXES, make_trace
from benchmarks.simulation.__main__ import compare, main
from benchmarks.simulation.figures import KEPT_MIN, Pair, report
from benchmarks.simulation.machine_watch import MachineWatch
from benchmarks.simulation.measured import COLOCATED, RULES, calibrated_as, fleet_settings
from benchmarks.simulation.predicted import WarmFleet, curves_of, plan_of, predict
from benchmarks.simulation.runs import (
    DRIFT_MAX,
    Run,
    Seen,
    apart,
    disturbance,
    drift,
    kept_run,
    of_round,
    read,
    write,
)
from disagg.commands.fitted_fleet import simulated
from disagg.commands.fleet_requests import Asked
from disagg.commands.measured_fleet import Answers, ask_shapes
from disagg.router.options import RouterOptions
from disagg.routing.policy.protocol import PolicyOptions
from disagg.routing.policy.registry import POLICIES
from disagg.simulation.curves import Curves, Line, Surface
from disagg.simulation.curves_file import curves_to_json
from disagg.simulation.prompts import TraceRequest
from tests.unit.simulation.fleets import curves

ALWAYS, OURS = RULES


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
    assert report("TTFT", pairs, 3, 0.07, "a test") is ok
    line = json.loads(capsys.readouterr().out)
    assert line["ok"] is ok
    assert line["rounds_apart"] == 0.07
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


def engine() -> Curves:
    return replace(curves(), request=Line((0,), (0,)), workers_per_host=2)


def answers(factor: float = 1.0, rule: System = OURS, read_ms: float = 0.0) -> Answers:
    """What a fleet says that takes the engine's times, or a multiple."""
    settings, curves = fleet_settings(calibrated_as(rule)), replace(engine(), read_more_ms=read_ms)
    return {
        shape: Asked(factor * one.ttft_ms, factor * one.tpot_ms, second_ms=one.second_ms)
        for shape in ask_shapes(engine(), settings)
        for one in [simulated(curves, settings, shape)]
    }


@pytest.fixture(scope="module")
def as_predicted() -> Run:
    """A run that went as its own prediction."""
    outcomes = predict(engine(), OURS, seen())
    requests = tuple(
        replace(one, ttft_ms=other.ttft_ms or 0, tpot_ms=other.tpot_ms or 0)
        for one, other in zip(seen(), outcomes, strict=True)
    )
    return Run("chat", OURS.policy, requests, (answers(), answers()), 0.05)


def test_the_same_requests_are_predicted_by_rule_and_curves() -> None:
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


def test_rule_and_roles_change_in_a_fleet_that_stays() -> None:
    fleet = WarmFleet(curves())
    trace = [TraceRequest(1e3 * n, 200, 4, (), (n,) * 200) for n in range(4)]
    handed = {
        system.policy: [one.handed_over for one in fleet.run(system, again(trace, number))]
        for number, system in enumerate((COLOCATED, ALWAYS, COLOCATED))
    }
    assert handed == {"local": [False] * 4, "prefix_then_load": [True] * 4}
    assert [one.info.role for one in fleet.world.workers] == ["both", "both"]
    assert SWITCHED not in POLICIES, "no rule of others"


def again(trace: list[TraceRequest], number: int) -> list[TraceRequest]:
    """The same with tokens that nobody has cached."""
    return [replace(one, tokens=(50 + 9 * number + one.tokens[0],) * 200) for one in trace]


def test_the_warm_up_teaches_the_router_what_a_hand_over_takes() -> None:
    """Else `estimated` weighs none: nothing is known of any link."""
    fleet = WarmFleet(curves())
    burst = [TraceRequest(0, 400, 60, (), (n,) * 400) for n in range(6)]
    fleet.run(OURS, burst)
    (router,) = fleet.world.routers.cores
    (record,) = [one for one in map(router.record, map(str, range(10_000))) if one is not None][-1:]
    shown = record.generations[0].considered
    moving = [one for one in shown if one.prefill != one.decode]
    assert moving, "two workers of both roles, both busy"
    assert all(one.estimate is not None for one in moving)


def test_the_simulated_rules_have_the_options_of_the_real_ones() -> None:
    found, real = plan_of(curves()).router.options, RouterOptions("", "")
    for one in fields(PolicyOptions):
        assert getattr(found, one.name) == getattr(real, one.name), one.name


def test_prompts_are_the_requests_own_tokens() -> None:
    """A prompt that was asked before is cached; one of the same length is not."""
    first = seen()[0]
    later = replace(first, sent_s=20.0)
    other = replace(later, sent_s=40.0, prompt=tuple(one + 1 for one in first.prompt))
    cached = [one.num_cached for one in predict(curves(), OURS, [first, later, other])]
    assert cached[0] == cached[2] == 0
    assert cached[1] > len(first.prompt) // 2


def test_requests_beside_others_are_left_out(
    as_predicted: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    one, *others = as_predicted.requests
    disturbed = replace(one, ttft_ms=1e6, others_share=0.5)
    run = replace(as_predicted, requests=(disturbed, *others))
    assert all(compare(engine(), [run], 0.1))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == ["chat, estimated: TTFT", "chat, estimated: TPOT"]
    assert all(line["ours"] < 0.05 and "1 more disturbed" in line["note"] for line in lines)
    twice = [replace(one, ttft_ms=2 * one.ttft_ms) for one in as_predicted.requests]
    slow = replace(as_predicted, requests=tuple(twice))
    assert compare(engine(), [slow], 0.1) == [False, True], "control"


def test_runs_that_are_thrown_away_are_told_and_count_for_nothing(
    as_predicted: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = tuple(replace(one, ttft_ms=2 * one.ttft_ms) for one in as_predicted.requests)
    away = replace(as_predicted, requests=twice, thrown_away="others took 30% of the machine")
    assert all(compare(engine(), [away, as_predicted], 0.1))
    assert "1 runs, 1 more thrown away (others took 30%" in capsys.readouterr().out
    assert not any(compare(engine(), [away], 0.1)), "nothing is left"


def run_of(policy: str, *factors: float, thrown_away: str = "", read_ms: float = 0.0) -> Run:
    """Calibrated by such multiples of the engine's times."""
    rule = next(one for one in RULES if one.policy == policy)
    calibrations = [answers(one, rule, read_ms) for one in factors]
    return Run("chat", policy, (), (calibrations[0], calibrations[-1]), 0.05, thrown_away)


def test_curves_are_those_of_all_calibrations_in_the_same_roles() -> None:
    """Of runs in a row, but for those that were thrown away."""
    together = [
        run_of(OURS.policy, 1.0, 1.2),
        run_of(OURS.policy, 5.0, thrown_away="noise"),
        run_of(OURS.policy, 1.2, 1.4),
    ]
    found = curves_of(engine(), [*together, run_of(ALWAYS.policy, 1.0)])
    (wanted,) = curves_of(engine(), [run_of(OURS.policy, 1.2)])
    assert found[0] == found[1] == found[2]
    assert found[0].step_more_ms == pytest.approx(wanted.step_more_ms)
    assert found[0].step_more_ms > 1
    assert found[3].step_more_ms < 0.1, "control: other roles"


def test_what_hand_overs_take_is_known_from_runs_with_hand_overs_alone() -> None:
    runs = [run_of(OURS.policy, 1.0), run_of(ALWAYS.policy, 1.0, read_ms=6.0)]
    found = curves_of(engine(), runs)
    assert [one.read_more_ms for one in found] == pytest.approx([6.0, 6.0], rel=0.05)
    assert curves_of(engine(), runs[:1])[0].read_more_ms == 0, "control: nobody handed over"


def test_how_far_the_same_requests_are_apart() -> None:
    first = Run("chat", OURS.policy, tuple(seen()), (answers(), answers()), 0.0)

    def again(first_token: int) -> Run:
        """A token shorter, and slower."""
        return replace(
            first,
            requests=tuple(
                replace(one, prompt=(one.prompt[0] + first_token, *one.prompt[1:-1]), ttft_ms=1.3)
                for one in first.requests
            ),
        )

    assert apart([first, again(0), again(1)], lambda one: one.ttft_ms) == pytest.approx(0.3)
    assert apart([first, again(0)], lambda one: one.tpot_ms) == 0
    assert apart([first, again(1)], lambda one: one.ttft_ms) is None, "no request was asked twice"


def test_every_round_asks_the_same_in_other_lengths() -> None:
    trace = make_trace(MIXES[0], 2.0, 6, 1)
    assert of_round(trace, 0) == trace
    for one, other in zip(trace, of_round(trace, 2), strict=True):
        assert replace(other, tokens=one.tokens) == one
        assert other.tokens == one.tokens[:-2]


@pytest.mark.parametrize(
    ("share", "factor", "why"),
    [
        (0.05, 1.0, ""),
        (0.05, 1 + 0.9 * DRIFT_MAX, ""),
        (0.2, 1.0, "others took 20% of the machine"),
        (0.05, 1.3, "30% apart"),
        (0.05, 0.7, "30% apart"),
    ],
)
def test_a_run_is_thrown_away_for_others_and_for_drift(
    as_predicted: Run, share: float, factor: float, why: str
) -> None:
    run = replace(as_predicted, calibrations=(answers(), answers(factor)), others_share=share)
    assert drift(*run.calibrations) == pytest.approx(abs(factor - 1))
    found = disturbance(run)
    assert why in found
    assert bool(found) is bool(why)


@pytest.mark.parametrize(
    ("bad", "tries", "wanted"), [(0, 3, 1), (1, 3, 2), (2, 3, 3), (9, 3, 3), (9, 1, 1)]
)
def test_a_run_is_repeated_a_few_times(
    as_predicted: Run, bad: int, tries: int, wanted: int
) -> None:
    def measure(num_tries: int) -> Run:
        return replace(as_predicted, thrown_away="noise" if num_tries < bad else "")

    found = kept_run(measure, lambda num: num < tries)
    assert len(found) == wanted
    assert all(one.thrown_away for one in found[:-1])
    assert bool(found[-1].thrown_away) is (bad >= tries)


def test_a_record_is_predicted_again_without_a_fleet(
    as_predicted: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "record.json"
    away = replace(as_predicted, thrown_away="noise")
    write(file, curves_to_json(engine(), {}), [away, as_predicted])
    assert read(file) == (engine(), [away, as_predicted])
    monkeypatch.setattr("sys.argv", ["benchmarks.simulation", "--again", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["ok"] for line in lines] == [True, True]


def test_a_fleet_is_calibrated_in_the_roles_of_the_run(as_predicted: Run) -> None:
    """What a reservation takes there is a part of what requests alone took."""
    assert calibrated_as(ALWAYS) == ALWAYS
    assert calibrated_as(OURS) == COLOCATED
    cluster = fleet_settings(ALWAYS).cluster
    assert (cluster.num_prefill, cluster.num_decode, cluster.num_both) == (1, 1, 0)
    given = ask_shapes(engine(), fleet_settings(ALWAYS))
    assert max(one.at_once for one in given) * 2 == max(one.at_once for one in answers())
    took = {one: simulated(engine(), fleet_settings(ALWAYS), one) for one in given}
    run = replace(as_predicted, policy=ALWAYS.policy, calibrations=(took, took))
    (found,) = curves_of(engine(), [run])
    assert found.request.ms[0] == pytest.approx(0, abs=0.1)
    (off,) = curves_of(engine(), [as_predicted])
    handed = simulated(engine(), fleet_settings(ALWAYS), given[0]).ttft_ms
    alone = simulated(off, fleet_settings(), given[0]).ttft_ms
    assert handed > alone + 0.5, "control: a hand-over is reserved first"
