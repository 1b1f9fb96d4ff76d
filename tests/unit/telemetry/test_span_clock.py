"""Spans last as long as something took, whoever sets the machine's clock meanwhile."""

from disagg.telemetry.span_clock import SpanClock

YEAR_NS = 365 * 86_400 * 10**9


def test_a_span_lasts_as_long_as_it_took_while_the_clock_is_set() -> None:
    wall_ns, monotonic_ns = [50 * YEAR_NS], [7]
    clock = SpanClock(lambda: wall_ns[0], lambda: monotonic_ns[0])
    assert clock.now_ns() == clock.began_ns == 50 * YEAR_NS
    for wall_ns[0] in (0, 40 * YEAR_NS, 90 * YEAR_NS):
        monotonic_ns[0] += 5
        taken_ns = monotonic_ns[0] - 7
        assert clock.now_ns() - clock.began_ns == taken_ns
    assert SpanClock(lambda: wall_ns[0], lambda: monotonic_ns[0]).began_ns == 90 * YEAR_NS
