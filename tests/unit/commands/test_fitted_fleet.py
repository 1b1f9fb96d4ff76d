"""What a fleet adds to an engine's own times is found from what its requests took."""

from dataclasses import replace

import pytest

from disagg.commands.fitted_fleet import simulated, with_serving
from disagg.commands.fleet_requests import ANSWER_TOKENS, Asked
from disagg.commands.measured_fleet import Answers, AskShape, ask_shapes
from disagg.config import read_settings
from disagg.config.settings import Settings
from disagg.config.sources import Given
from disagg.simulation.curves import NOTHING, Curves, Line, Surface
from tests.unit.simulation.fleets import curves

WAY = Line((48, 120, 240, 960, 2_880), (17.0, 30.0, 33.0, 60.0, 70.0))
SLOWER = 1.2


def settings(*, disaggregated: bool = False, step_tokens: int = 512) -> Settings:
    given = {
        "cluster.num_both": 0 if disaggregated else 2,
        "cluster.num_prefill": int(disaggregated),
        "cluster.num_decode": int(disaggregated),
        "router.policy": "prefix_then_load" if disaggregated else "local",
        "scheduling.max_model_tokens": 8_192,
        "scheduling.max_step_tokens": step_tokens,
    }
    values = {name: Given(value, "test") for name, value in given.items()}
    return read_settings(None, {}, values).settings


def engine(workers_per_host: int = 1) -> Curves:
    """As an engine alone is measured."""
    return replace(curves(), request=Line((0,), (0,)), workers_per_host=workers_per_host)


def answers_of(
    real: Curves, given: Settings | None = None, *, tell_compute: bool = False
) -> dict[AskShape, Asked]:
    """What requests of all shapes take where these are the curves."""
    given = given or settings()
    found = {}
    for shape in ask_shapes(real, given):
        one = simulated(real, given, replace(shape, beside=0))
        start, num = round(one.num_cached), shape.num_prompt + shape.num_prefix
        chunks = [(min(512, num - at), at) for at in range(start, num, 512)]
        steps_ms = [real.prefill.at(*each) + real.step_more_ms for each in chunks]
        computes_ms, stream_ms = sum(steps_ms), None
        if shape.beside:
            shares = [real.beside.at(tokens) for tokens, _ in chunks]
            more_ms = sum(ms * share for ms, share in zip(steps_ms, shares, strict=True))
            one = replace(one, ttft_ms=one.ttft_ms + more_ms + real.request_beside_ms)
            computes_ms += more_ms
            stream_ms = simulated(real, given, AskShape(120)).later_tpot_ms
            stream_ms *= 1 + real.beside.at(1)
        if tell_compute:
            one = replace(one, compute_ms=computes_ms, beside_tpot_ms=stream_ms)
        found[shape] = one if tell_compute else replace(one, second_ms=None)
    return found


def test_what_a_fleet_adds_is_found_again() -> None:
    real = replace(engine(), request=WAY, step_more_ms=3.0, sequence_more_ms=0.7)
    found = with_serving(engine(), settings(), answers_of(real))
    assert found.step_more_ms == pytest.approx(3.0, rel=0.1)
    assert found.sequence_more_ms == pytest.approx(0.7, rel=0.1)
    assert found.request.along == WAY.along
    assert found.request.ms == pytest.approx(WAY.ms, abs=0.5)
    assert found.prefill == engine().prefill, "nobody has said what workers computed"


@pytest.mark.parametrize("num_prompt", [48, 100, 120, 200, 240, 960, 2_880])
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


def test_later_chunks_of_long_prompts_are_scaled_by_what_long_prompts_took() -> None:
    """Here the first two chunks are slower in a worker than alone, and the later ones are not."""
    alone = engine().prefill
    along = (0, 512, 1024, 4096)
    rows = [[(2 if at < 1024 else 1) * alone.at(num, at) for at in along] for num in alone.across]
    real = replace(engine(), prefill=Surface(alone.across, along, tuple(map(tuple, rows))))
    answers = answers_of(real, tell_compute=True)

    def ttft_ms(known: Answers) -> float:
        return simulated(
            with_serving(engine(), settings(), known), settings(), AskShape(3_500)
        ).ttft_ms

    wanted_ms = simulated(real, settings(), AskShape(3_500)).ttft_ms
    assert ttft_ms(answers) == pytest.approx(wanted_ms, rel=0.05)
    short = {shape: one for shape, one in answers.items() if shape.num_prompt < 2_880}
    assert ttft_ms(short) > 1.3 * wanted_ms, "control: nobody asked a long one"


def test_short_steps_behind_a_cached_prefix_take_what_they_took() -> None:
    alone = engine().prefill
    ms = tuple(
        (row[0], *(1.5 * alone.at(num, 480) for _ in (0, 1)))
        for num, row in zip(alone.across[:2], alone.ms[:2], strict=True)
    )
    real = replace(
        engine(),
        prefill=Surface(alone.across, (0, 480, 4096), (*ms, (alone.ms[-1][0],) * 3)),
    )
    answers = answers_of(real, tell_compute=True)
    found = with_serving(engine(), settings(), answers)
    for num in (48, 64):
        assert found.prefill.at(num, 480) == pytest.approx(real.prefill.at(num, 480), rel=0.05)
        assert found.prefill.at(num, 0) == pytest.approx(real.prefill.at(num, 0), rel=0.05)
    fresh = {shape: one for shape, one in answers.items() if not shape.num_prefix}
    off = with_serving(engine(), settings(), fresh)
    assert off.prefill.at(48, 480) < 0.75 * real.prefill.at(48, 480), "control: nobody asked it"
    missed = {shape: replace(one, num_cached=0) for shape, one in answers.items()}
    missed = {shape: one for shape, one in missed.items() if not shape.num_prefix} | {
        shape: one for shape, one in missed.items() if shape.num_prefix
    }
    assert with_serving(engine(), settings(), missed).prefill == off.prefill, "nothing was cached"


def test_what_a_hand_over_takes_more_is_in_second_tokens_alone() -> None:
    given = settings(disaggregated=True)
    real = replace(engine(), request=WAY, step_more_ms=3.0, read_more_ms=8.0)
    found = with_serving(engine(), given, answers_of(real, given, tell_compute=True))
    assert found.read_more_ms == pytest.approx(8.0, rel=0.05)
    assert found.step_more_ms == pytest.approx(3.0, rel=0.1)
    untold = with_serving(engine(), given, answers_of(real, given))
    assert untold.read_more_ms == 0
    assert untold.step_more_ms > 3.0 + 0.9 * 8.0 / ANSWER_TOKENS, "control: it is in all tokens"
    together = with_serving(engine(), settings(), answers_of(real, tell_compute=True))
    assert together.read_more_ms == 0, "nobody hands over"


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
        beside=Line((0,), (beside_share,)),
        request_beside_ms=way_ms,
    )
    answers = answers_of(real, tell_compute=tell_compute)
    found = with_serving(engine(2), settings(), answers)
    for tokens in (1, 48, 512):
        assert found.beside.at(tokens) == pytest.approx(beside_share, rel=0.1, abs=0.01)
    assert found.request_beside_ms == pytest.approx(way_ms, rel=0.1, abs=0.1)
    assert found.sequence_more_ms < 0.1, "what others cost is not the sequences'"


def test_others_cost_short_and_long_steps_what_each_took() -> None:
    shares = Line((1, 48, 240, 512), (0.3, 0.4, 0.2, 0.1))
    real = replace(engine(2), request=WAY, beside=shares)
    found = with_serving(engine(2), settings(), answers_of(real, tell_compute=True))
    assert found.beside.along == shares.along
    assert found.beside.ms == pytest.approx(shares.ms, abs=0.03)
    large = settings(step_tokens=4_096)
    long = with_serving(engine(2), large, answers_of(real, tell_compute=True))
    assert long.beside.at(8_192) == long.beside.at(960), "nobody asked longer steps"
    nobody = with_serving(engine(1), settings(), answers_of(engine(1), tell_compute=True))
    assert nobody.beside == NOTHING, "control: a host for each"


def test_a_fleet_that_is_faster_than_its_parts_adds_nothing() -> None:
    fast = dict.fromkeys(ask_shapes(engine(2), settings()), Asked(0.1, 0.1))
    found = with_serving(engine(2), settings(), fast)
    assert (found.step_more_ms, found.sequence_more_ms, found.read_more_ms) == (0, 0, 0)
    assert not any(found.beside.ms)
    assert set(found.request.ms) == {0}
