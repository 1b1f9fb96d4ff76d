"""Steps are added up by what they compute; cold ones are not."""

import pytest

from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.messages.step_times import StepShape, StepTimes
from disagg.routing.estimates.least_squares import FadingFit
from disagg.scheduling.step import SequenceSlice
from disagg.scheduling.step_meter import WARM_UP_STEPS, StepMeter, shape_of

KEY, SAMPLING = RequestKey("a", 0), SamplingParams(4)


def part(num_tokens: int, start: int, *, samples: bool = True, drafts: int = 0) -> SequenceSlice:
    sampling = SAMPLING if samples else None
    return SequenceSlice(KEY, (1,) * num_tokens, start, False, (), sampling, num_drafts=drafts)


def test_a_step_is_known_by_its_chunks_and_its_decodes() -> None:
    slices = [part(1, 512), part(1, 1536), part(4, 2048, drafts=3), part(100, 1024, samples=False)]
    context = (100 * 1024 + 99 * 100 / 2) / 1024
    assert shape_of(slices) == StepShape(100, context, 3, 4.0)
    assert shape_of([part(1, 0)]) == StepShape(1, 0.0, 0, 0.0), "a prompt of one token"
    assert shape_of([part(1, 64, samples=False)]).num_decodes == 0, "a chunk of one token"


def warm(meter: StepMeter) -> None:
    for _ in range(WARM_UP_STEPS):
        meter.add(StepShape(0, 0.0, 1, 1.0), 5_000.0)


def test_first_steps_and_the_first_of_a_size_count_for_nothing() -> None:
    meter = StepMeter(512)
    warm(meter)
    meter.add(StepShape(300, 0.0, 0, 0.0), 9_000.0)
    assert meter.times == StepTimes(step_tokens_max=512)
    meter.add(StepShape(310, 0.0, 0, 0.0), 31.0)
    assert meter.times.num_steps == 1
    assert meter.times.timed[:2] == (31.0, 31.0 * 310)


def test_an_idle_step_says_nothing() -> None:
    meter = StepMeter()
    warm(meter)
    for _ in range(3):
        meter.add(StepShape(0, 0.0, 0, 0.0), 1.0)
    assert meter.times.num_steps == 0


def test_sums_give_the_speed_back() -> None:
    meter = StepMeter()
    for number in range(40):
        decodes, tokens = 1 + number % 8, 64 * (number % 3)
        cold_ms = 1_000 if number < WARM_UP_STEPS else 0
        meter.add(StepShape(tokens, 0.0, decodes, 0.0), 3 + 0.1 * tokens + 0.5 * decodes + cold_ms)
    fit = FadingFit(5, 500)
    fit.add(meter.times.num_steps, meter.times.products, meter.times.timed)
    step, token, _, decode, _ = fit.coefficients()
    assert (step, token, decode) == pytest.approx((3, 0.1, 0.5), rel=0.1)


def test_what_two_reports_differ_in_is_what_happened_between_them() -> None:
    meter = StepMeter()
    warm(meter)
    for _ in range(3):
        meter.add(StepShape(0, 0.0, 1, 1.0), 10.0)
    before = meter.times
    meter.add(StepShape(0, 0.0, 1, 1.0), 20.0)
    new = meter.times.since(before)
    assert new is not None
    assert (new.num_steps, new.timed[0]) == (1, 20.0)
    assert before.since(meter.times) is None, "it began anew"
    assert before.since(before) is None
