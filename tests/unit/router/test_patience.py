"""Waiting for a slow peer: what renews it, and what does not."""

from disagg.router.patience import Patience


def test_a_byte_renews_it_and_nothing_does_not() -> None:
    patience = Patience(0.0, 10.0, 0)
    assert patience.left_s(4.0) == 6.0
    patience.moved(4.0, 0)
    assert patience.left_s(4.0) == 6.0
    patience.moved(9.0, 1)
    assert patience.left_s(9.0) == 10.0
    assert patience.left_s(19.5) < 0


def test_who_keeps_the_rate_is_never_cut_off() -> None:
    patience = Patience(0.0, 10.0, 100)
    for second in range(1, 100_000):
        patience.moved(float(second), 100)
        assert patience.left_s(float(second)) == 10.0


def test_who_moves_a_byte_now_and_then_is() -> None:
    patience = Patience(0.0, 10.0, 100)
    second = 0
    while patience.left_s(second) > 0:
        second += 1
        patience.moved(second, 1)
        assert second < 20
    lenient = Patience(0.0, 10.0, 0)  # control: without a rate it could go on for ever
    for second in range(1, 1000):
        lenient.moved(second, 1)
        assert lenient.left_s(second) == 10.0
