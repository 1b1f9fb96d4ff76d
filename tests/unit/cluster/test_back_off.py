"""How long a crash loop waits."""

from disagg.cluster.back_off import BackOff


def test_the_first_end_costs_no_time_and_a_loop_more_and_more() -> None:
    back_off = BackOff()
    delays = [back_off.ended(now_s=float(i)) for i in range(12)]
    assert delays[:5] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert delays[-3:] == [60.0, 60.0, 60.0]


def test_to_begin_is_not_enough_to_start_afresh() -> None:
    back_off = BackOff()
    delays = []
    for start_s in range(0, 100, 10):
        back_off.runs(float(start_s))
        delays.append(back_off.ended(start_s + 9.0))
    assert delays == sorted(delays)
    assert delays[-1] == 60.0


def test_who_has_run_for_a_while_starts_afresh() -> None:
    back_off = BackOff()
    for now_s in range(5):
        back_off.ended(float(now_s))
    back_off.runs(100.0)
    back_off.runs(150.0)  # said again: it has run since the first time
    assert back_off.ended(160.0) == 0.0
    assert back_off.ended(161.0) == 1.0
