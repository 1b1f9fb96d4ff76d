"""Fits over sums: what was put in comes out, and nothing below 0."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disagg.routing.estimates.least_squares import FadingFit, solve

TRUE = (4.0, 0.1, 0.02, 0.5, 0.3)


def sample(rng: random.Random, *, prefill: bool = True) -> tuple[float, ...]:
    tokens = rng.choice((0, 0, 64, 100, 512)) if prefill else 0
    decodes = rng.randint(0, 16)
    return (1.0, tokens, tokens * rng.random(), decodes, decodes * rng.random() * 4)


def time_of(features: tuple[float, ...], true: tuple[float, ...] = TRUE) -> float:
    return sum(a * b for a, b in zip(features, true, strict=True))


def fitted(
    num: int, *, noise: float = 0.0, prefill: bool = True, true: tuple[float, ...] = TRUE
) -> FadingFit:
    rng, fit = random.Random(3), FadingFit(5, 500)
    for _ in range(num):
        features = sample(rng, prefill=prefill)
        fit.add_sample(features, time_of(features, true) * (1 + noise * rng.uniform(-1, 1)))
    return fit


def test_coefficients_come_out_as_they_went_in() -> None:
    assert fitted(400).coefficients() == pytest.approx(TRUE, rel=0.02, abs=0.01)


def test_noise_changes_a_prediction_little() -> None:
    found = fitted(1000, noise=0.3).coefficients()
    for features in ((1.0, 512.0, 256.0, 0.0, 0.0), (1.0, 0.0, 0.0, 8.0, 16.0)):
        told = sum((c or 0) * x for c, x in zip(found, features, strict=True))
        assert told == pytest.approx(time_of(features), rel=0.15)


def test_what_was_never_seen_is_unknown() -> None:
    step, token, context, decode, _ = fitted(200, prefill=False).coefficients()
    assert (token, context) == (None, None)
    assert (step, decode) == pytest.approx((TRUE[0], TRUE[3]), rel=0.05)


def test_what_was_never_seen_is_as_elsewhere() -> None:
    own = fitted(200, prefill=False, true=(8.0, 0, 0, 1.0, 0.6))
    step, token, context, decode, _ = own.coefficients(fitted(400), 16)
    assert token == pytest.approx(TRUE[1], rel=0.3)
    assert context is not None
    assert (step, decode) == pytest.approx((8.0, 1.0), rel=0.2), "what it did itself counts more"


def test_old_samples_fade() -> None:
    fit = FadingFit(1, 10)
    for value in [100.0] * 50 + [10.0] * 50:
        fit.add_sample((1.0,), value)
    (found,) = fit.coefficients()
    assert found == pytest.approx(10, rel=0.5)
    lasting = FadingFit(1, 1e9)
    for value in [100.0] * 50 + [10.0] * 50:
        lasting.add_sample((1.0,), value)
    assert lasting.coefficients()[0] == pytest.approx(55, rel=0.1), "control: nothing fades"


def test_a_whole_life_at_once_gives_way_to_what_comes_after() -> None:
    fit = FadingFit(1, 10)
    fit.add(100_000, [100_000.0], [100_000 * 50.0])
    assert fit.coefficients()[0] == pytest.approx(50, rel=0.01)
    for _ in range(100):
        fit.add_sample((1.0,), 5.0)
    assert fit.coefficients()[0] == pytest.approx(5, rel=0.1)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(*[st.floats(0, 1e4)] * 4, st.floats(0, 1e6)),
        min_size=1,
        max_size=30,
    )
)
def test_no_samples_give_a_coefficient_below_0_or_no_number(
    samples: list[tuple[float, float, float, float, float]],
) -> None:
    fit = FadingFit(5, 20)
    for *features, value in samples:
        fit.add_sample((1.0, *features), value)
    for found in fit.coefficients():
        assert found is None or 0 <= found < float("inf")


def test_sums_out_of_bounds_are_no_knowledge() -> None:
    assert solve(1, [float("inf")], [1.0]) == (None,)
    assert solve(1, [2.0], [float("nan")]) == (None,)
    assert solve(1, [2.0], [1.0])[0] == pytest.approx(0.5, rel=1e-3)


SUMS = st.one_of(st.sampled_from([0.0, 1.0, 1.0001, 1e-17, 1e150, 1e308]), st.floats(0, 1e9))


@settings(deadline=None, max_examples=500)
@example([1.0, 1.0001, 0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0])
@example([1e-17, 1e308, 0.0, 1e-17, 0.0, 0.0], [1e308, 1.0, 0.0])
@given(st.lists(SUMS, min_size=6, max_size=6), st.lists(SUMS, min_size=3, max_size=3))
def test_sums_that_no_samples_have_are_no_error(products: list[float], timed: list[float]) -> None:
    """A worker may tell anything: planning goes on."""
    assert all(one is None or 0 <= one < float("inf") for one in solve(3, products, timed))
