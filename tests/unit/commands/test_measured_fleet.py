"""What a fleet adds to an engine's own times is found from what its requests took."""

from dataclasses import replace

import pytest

from disagg.commands.fleet_requests import Asked
from disagg.commands.measured_fleet import (
    PROMPT_TOKENS,
    AskShape,
    ask_shapes,
    middle,
    simulated,
    with_serving,
)
from disagg.config import read_settings
from disagg.config.settings import Settings
from disagg.config.sources import Given
from disagg.simulation.curves import Curves, Line, Surface
from tests.unit.simulation.fleets import curves

WAY = Line((48, 120, 240, 960), (17.0, 30.0, 33.0, 60.0))
SLOWER = 1.2


def settings() -> Settings:
    given = {
        "cluster.num_both": 2,
        "cluster.num_prefill": 0,
        "cluster.num_decode": 0,
        "router.policy": "local",
        "scheduling.max_model_tokens": 8_192,
        "scheduling.max_step_tokens": 512,
    }
    values = {name: Given(value, "test") for name, value in given.items()}
    return read_settings(None, {}, values).settings


def engine(workers_per_host: int = 1) -> Curves:
    """As an engine alone is measured."""
    return replace(curves(), request=Line((0,), (0,)), workers_per_host=workers_per_host)


def answers_of(real: Curves, *, tell_compute: bool = False) -> dict[AskShape, Asked]:
    """What requests of all shapes take where these are the curves."""
    found = {}
    for shape in ask_shapes(real, settings()):
        one = simulated(real, settings(), replace(shape, beside=0))
        num = shape.num_prompt
        computes_ms = real.prompt_ms(num, 512) + -(-num // 512) * real.step_more_ms
        if shape.beside:
            more_ms = real.beside_share * computes_ms
            one = replace(one, ttft_ms=one.ttft_ms + more_ms + real.request_beside_ms)
            computes_ms += more_ms
        found[shape] = replace(one, compute_ms=computes_ms) if tell_compute else one
    return found


def test_what_a_fleet_adds_is_found_again() -> None:
    real = replace(engine(), request=WAY, step_more_ms=3.0, sequence_more_ms=0.7)
    found = with_serving(engine(), settings(), answers_of(real))
    assert found.step_more_ms == pytest.approx(3.0, rel=0.1)
    assert found.sequence_more_ms == pytest.approx(0.7, rel=0.1)
    assert found.request.along == WAY.along
    assert found.request.ms == pytest.approx(WAY.ms, abs=0.5)
    assert found.prefill == engine().prefill, "nobody has said what workers computed"


@pytest.mark.parametrize("num_prompt", [48, 100, 120, 200, 240, 960])
def test_first_tokens_between_the_lengths_that_were_asked(num_prompt: int) -> None:
    """A worker that is slower than its engine alone is at some lengths, and a way that bends."""
    slower = Surface(
        (1, 64, 128, 256, 512), (0, 4096), ((10, 11), (30, 33), (40, 44), (45, 50), (70, 80))
    )
    real = replace(engine(), prefill=slower, request=WAY, step_more_ms=2.0)
    shape = AskShape(num_prompt)
    wanted_ms = simulated(real, settings(), shape).ttft_ms
    for tell_compute in (False, True):
        answers = answers_of(real, tell_compute=tell_compute)
        found = with_serving(engine(), settings(), answers)
        assert simulated(found, settings(), shape).ttft_ms == pytest.approx(wanted_ms, rel=0.05)
        ends = {one: each for one, each in answers.items() if one.num_prompt in (48, 960)}
        if num_prompt in (120, 200):
            off = with_serving(engine(), settings(), ends)
            off_ms = simulated(off, settings(), shape).ttft_ms
            assert off_ms != pytest.approx(wanted_ms, rel=0.08), "control: two lengths alone"


def test_what_workers_say_of_prompts_scales_their_steps_and_not_the_way() -> None:
    real = replace(
        engine(),
        prefill=Surface(
            engine().prefill.across,
            engine().prefill.along,
            tuple(tuple(SLOWER * ms for ms in row) for row in engine().prefill.ms),
        ),
        request=WAY,
    )
    told = with_serving(engine(), settings(), answers_of(real, tell_compute=True))
    for num, before in ((128, 0), (256, 2_000), (512, 0)):
        wanted_ms = SLOWER * engine().prefill.at(num, before)
        assert told.prefill.at(num, before) == pytest.approx(wanted_ms, rel=0.02)
    assert told.request.ms == pytest.approx(WAY.ms, abs=1)
    untold = with_serving(engine(), settings(), answers_of(real))
    assert untold.request.ms[-1] > WAY.ms[-1] + 10, "control: all of it is the way's"


@pytest.mark.parametrize("tell_compute", [False, True])
@pytest.mark.parametrize(("beside_share", "way_ms"), [(0.0, 0.0), (0.4, 0.0), (0.2, 5.0)])
def test_what_other_workers_of_a_host_cost_is_found_again(
    beside_share: float, way_ms: float, tell_compute: bool
) -> None:
    real = replace(
        engine(2),
        request=WAY,
        step_more_ms=3.0,
        beside_share=beside_share,
        request_beside_ms=way_ms,
    )
    answers = answers_of(real, tell_compute=tell_compute)
    found = with_serving(engine(2), settings(), answers)
    assert found.beside_share == pytest.approx(beside_share, rel=0.1, abs=0.01)
    assert found.request_beside_ms == pytest.approx(way_ms, rel=0.1, abs=0.1)
    assert found.sequence_more_ms < 0.1, "what others cost is not the sequences'"


def test_nobody_is_asked_beside_others_where_a_host_has_one_worker() -> None:
    assert not any(one.beside for one in ask_shapes(engine(1), settings()))
    beside = [one for one in ask_shapes(engine(2), settings()) if one.beside]
    assert [(one.beside, one.num_prompt) for one in beside] == [(1, PROMPT_TOKENS), (1, 240)]
    assert [one.beside for one in ask_shapes(engine(8), settings())][-1] == 1, "no third worker"


def test_a_model_of_few_tokens_is_asked_for_no_more_than_half_of_them() -> None:
    tiny = replace(engine(2), max_model_tokens=512)
    assert max(one.num_prompt for one in ask_shapes(tiny, settings())) == 240
    tiny = replace(engine(2), max_model_tokens=128)
    assert {one.num_prompt for one in ask_shapes(tiny, settings())} == {PROMPT_TOKENS, 64}


def test_a_fleet_that_is_faster_than_its_parts_adds_nothing() -> None:
    fast = dict.fromkeys(ask_shapes(engine(2), settings()), Asked(0.1, 0.1))
    found = with_serving(engine(2), settings(), fast)
    assert (found.step_more_ms, found.sequence_more_ms, found.beside_share) == (0, 0, 0)
    assert set(found.request.ms) == {0}


def test_the_middle_of_rounds() -> None:
    rounds = [Asked(1, 9, 5), Asked(2, 7, None), Asked(90, 8, 6)]
    assert middle(rounds) == Asked(2, 8, 5.5)
    assert middle([Asked(1, 1)]).compute_ms is None
