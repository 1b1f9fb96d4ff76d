"""An average of what was lately, and of what is usual when nothing new comes."""

import pytest

from disagg.routing.estimates.fading_mean import IDLE_HALF_LIFE_MS, FadingMean


def test_old_figures_fade() -> None:
    mean = FadingMean()
    assert mean.at(0) == 0
    mean.add(5, 10.0)
    assert mean.at(5) == mean.at(10**9) == 10
    for _ in range(60):
        mean.add(5, 100.0)
    assert mean.at(5) == pytest.approx(100, rel=0.01)
    assert mean.at(0) == mean.at(5), "a time before it"


def test_without_new_figures_it_comes_back_to_what_is_usual() -> None:
    mean = FadingMean()
    for figure in [10.0] * 900 + [500.0] * 30:
        mean.add(0, figure)
    before, usual = mean.at(0), (900 * 10 + 30 * 500) / 930
    assert before > 400
    assert mean.at(IDLE_HALF_LIFE_MS) == pytest.approx((before + usual) / 2)
    assert mean.at(100 * IDLE_HALF_LIFE_MS) == pytest.approx(usual)
    for _ in range(3):
        mean.add(100 * IDLE_HALF_LIFE_MS, 500.0)
    assert mean.at(100 * IDLE_HALF_LIFE_MS) > 2 * usual, "it counts from there"


def test_outliers_hardly_move_what_is_usual() -> None:
    mean = FadingMean(usual_max=4.0)
    for figure in [10.0] * 300 + [4000.0] * 30:
        mean.add(0, figure)
    assert mean.at(0) > 3500, "as it is now"
    assert mean.at(100 * IDLE_HALF_LIFE_MS) < 15
    for _ in range(5000):
        mean.add(0, 4000.0)
    assert mean.at(100 * IDLE_HALF_LIFE_MS) > 3500, "what stays is usual"


def test_control_of_figures_with_nothing_usual_all_count() -> None:
    mean = FadingMean()
    for figure in [0.0] * 100 + [4000.0] * 100:
        mean.add(0, figure)
    assert mean.at(100 * IDLE_HALF_LIFE_MS) == pytest.approx(2000)


def test_where_most_take_no_time_the_others_are_no_outliers() -> None:
    mean = FadingMean(usual_max=4.0)
    for _ in range(500):
        for figure in (0.0, 0.0, 0.0, 3.0):
            mean.add(0, figure)
    assert mean.at(100 * IDLE_HALF_LIFE_MS) == pytest.approx(0.75, rel=0.1)


def test_a_figure_below_0_is_none() -> None:
    mean = FadingMean()
    mean.add(0, -5.0)
    assert mean.at(0) == 0
