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
    # 11 wait, and two ended in the 2 s since the first end.
    assert caught.value.retry_after_s == 12
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


def test_time_in_which_requests_waited_in_vain_is_a_slow_pace() -> None:
    """They were there, whether any has ended or not."""
    pace = EndPace()
    for number in range(64):
        pace.note(100 * number)
    for now_ms in range(6_400, 120_000, 100):
        pace.see(now_ms, idle=False)
    pace.see(3_600_000, idle=True)
    assert pace.retry_after_s(3_600_000, 1) == 2
