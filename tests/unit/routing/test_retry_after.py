"""When a router says that who found no room may come again."""

import pytest

from disagg.errors import CapacityError
from disagg.routing.end_pace import EndPace
from tests.unit.routing.test_admission import Fleet


def test_the_advised_wait_is_what_the_queue_takes() -> None:
    fleet = Fleet("both", requests_max=12)
    assert fleet.core.retry_after_s(0) == 1
    fleet.ask(*(f"r{n}" for n in range(12)))
    for _ in range(2):
        fleet.now_ms += 2000
        fleet.finish(fleet.order[-1])
    fleet.ask("r12", "r13")
    with pytest.raises(CapacityError) as caught:
        fleet.ask("r14")
    assert caught.value.retry_after_s == 24  # 11 wait, each takes 2 s
    fleet.now_ms += 3_600_000
    with pytest.raises(CapacityError) as caught:
        fleet.ask("r14")
    assert caught.value.retry_after_s == 60


def test_a_time_without_requests_is_no_slow_pace() -> None:
    """The first ones in the morning would be told that each takes a part of the night."""
    fleet = Fleet("both", requests_max=12, worker_silent_ms=10**9)

    def serve(day: int, until: int) -> None:
        for number in range(until):
            fleet.ask(f"{day}-{number}")
            fleet.now_ms += 100
            fleet.finish(f"{day}-{number}")

    serve(0, 64)
    for day in (1, 2):
        fleet.now_ms += 28_800_000
        assert fleet.core.retry_after_s(fleet.now_ms) == 1
        serve(day, 2)
    fleet.now_ms += 28_800_000
    fleet.ask(*(f"r{n}" for n in range(12)))
    with pytest.raises(CapacityError) as caught:
        fleet.ask("more")
    assert caught.value.retry_after_s == 2  # 11 wait, each takes 0.1 s
    fleet.now_ms += 3_600_000
    assert fleet.core.retry_after_s(fleet.now_ms) == 60, "control: nothing ends any more"


def test_after_a_calm_time_it_is_the_pace_of_as_many_as_run_now() -> None:
    """One at a time ended every 4 s; eight at once end eight times as often."""
    fleet = Fleet("both", max_sequences=8, requests_max=24, worker_silent_ms=10**9)

    def refused_for_s() -> int:
        with pytest.raises(CapacityError) as caught:
            fleet.ask("more")
        return caught.value.retry_after_s

    for number in range(70):
        fleet.ask(f"calm{number}")
        fleet.now_ms += 4000
        fleet.finish(f"calm{number}")
    fleet.ask(*(f"r{number}" for number in range(24)))
    assert (len(fleet.running), refused_for_s()) == (8, 9)  # 17 ends, each takes 4 s / 8
    fleet.now_ms += 4000
    for number in range(8):
        fleet.finish(f"r{number}")
    fleet.ask(*(f"r{number}" for number in range(24, 32)))
    assert refused_for_s() == 9, "so it was"
    fleet.now_ms += 40_000
    slow_s = refused_for_s()
    assert slow_s > 15, "control: these take ten times as long"
    for number in range(8, 16):
        fleet.finish(f"r{number}")
    assert slow_s > fleet.core.retry_after_s(fleet.now_ms) > 9, "some did, most did not"


def served(pace: EndPace, num: int, took_ms: int, start_ms: int = 0) -> int:
    """Let requests be served one after another; returns the time of the last end."""
    for number in range(num):
        pace.begin(start_ms + number * took_ms)
        pace.end(start_ms + (number + 1) * took_ms, start_ms + number * took_ms)
    return start_ms + num * took_ms


def test_many_that_began_at_once_have_not_slowed_before_they_could_end() -> None:
    pace = EndPace()
    now_ms = served(pace, 64, 10_000)
    for _ in range(256):
        pace.begin(now_ms)
    for aged_ms in (0, 5000, 10_000):
        assert pace.retry_after_s(now_ms + aged_ms, 256) == 10, aged_ms
    assert pace.retry_after_s(now_ms + 20_000, 256) == 20, "control: they have"


def test_a_few_that_take_most_places_for_long_are_seen_while_short_ones_end() -> None:
    pace = EndPace()
    now_ms = served(pace, 64, 1000)
    for _ in range(60):
        pace.begin(now_ms)
    assert pace.retry_after_s(now_ms, 60) == 1  # not known to be long
    for second in range(16):  # 4 places are left for others, each of a second
        for _ in range(4):
            pace.begin(now_ms + 1000 * second)
        for _ in range(4):
            pace.end(now_ms + 1000 * (second + 1), now_ms + 1000 * second)
    for _ in range(4):
        pace.begin(now_ms + 16_000)
    assert pace.retry_after_s(now_ms + 16_000, 60) == 15


def test_before_anything_has_ended_it_is_as_long_as_they_have_been_there() -> None:
    pace = EndPace()
    assert pace.retry_after_s(10**9, 5) == 1
    for _ in range(4):
        pace.begin(10**9)
    assert [pace.retry_after_s(10**9 + ms, 8) for ms in (0, 5000, 10**6)] == [1, 10, 60]
