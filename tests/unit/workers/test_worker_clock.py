"""A worker's clock stands still while its process does."""

from disagg.workers.worker_clock import STEP_MS_MAX, WorkerClock


class Machine:
    """A monotonic clock that a test sets."""

    now_ms = 5_000


def test_time_goes_by_as_on_the_machine_while_it_is_read() -> None:
    machine = Machine()
    clock = WorkerClock(lambda: machine.now_ms)
    begun_ms = clock.now_ms()
    for _ in range(100):
        machine.now_ms += STEP_MS_MAX
        clock.now_ms()
    assert clock.now_ms() - begun_ms == 100 * STEP_MS_MAX


def test_a_pause_is_no_time() -> None:
    machine = Machine()
    clock = WorkerClock(lambda: machine.now_ms)
    begun_ms = clock.now_ms()
    machine.now_ms += 3_600_000
    assert clock.now_ms() - begun_ms == STEP_MS_MAX
    machine.now_ms += 10
    assert clock.now_ms() - begun_ms == STEP_MS_MAX + 10
