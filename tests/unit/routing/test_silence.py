"""Who falls silent under load is noticed soon; who is slow, or a stall of the router's, is not."""

from dataclasses import replace

import pytest

from disagg.messages.registration import WorkerInfo
from disagg.routing.actions import Connect
from disagg.routing.pulse import GAPS_MAX, OBSERVED_MS, REMEMBERED_MS, TICK_MS_MAX
from tests.unit.routing.builders import STATS, Router, request, worker

P, D, D2 = worker("p", "prefill"), worker("d", "decode"), worker("d2", "decode")
BUSY_MS, SILENT_MS, TICK_MS, BEAT_MS = 1_500, 10_000, 100, 200
BUSY = replace(STATS, num_running=1)


class Loaded(Router):
    """A request runs at P and D; everybody reports every `BEAT_MS` unless it is kept from it."""

    def __init__(self, *workers: WorkerInfo, busy_ms: int = BUSY_MS) -> None:
        super().__init__(
            *workers,
            worker_silent_ms=SILENT_MS,
            worker_silent_busy_ms=busy_ms,
            request_timeout_ms=1 << 30,
        )
        self.workers = workers
        self.dropped: list[tuple[int, str]] = []
        self.generate(request(max_tokens=100))

    def go_on(self, for_ms: int, *quiet: WorkerInfo, beat_ms: int = BEAT_MS) -> None:
        """Let time pass; those that are quiet send nothing."""
        end_ms = self.now_ms + for_ms
        while self.now_ms < end_ms:
            self.now_ms += TICK_MS
            known = [view.info.incarnation for view in self.core.fleet]
            for info in self.workers:
                if info.incarnation in known and info not in quiet and not self.now_ms % beat_ms:
                    self.core.from_worker(self.now_ms, info.incarnation, BUSY)
            self.tick()

    def tick(self) -> None:
        self.did(self.core.tick(self.now_ms))
        self.dropped += [(self.now_ms, who.worker_id) for who in self.disconnected]


def test_one_that_falls_silent_under_load_is_noticed_soon_and_its_request_goes_on() -> None:
    router = Loaded(P, D, D2)
    router.go_on(2 * OBSERVED_MS)
    began_ms = router.now_ms
    router.go_on(BUSY_MS, D)
    assert router.dropped == []
    router.go_on(TICK_MS, D)
    assert router.dropped == [(began_ms + BUSY_MS + TICK_MS, "d")]
    assert "d2" in {name for name, _ in router.submits}
    assert router.record("r").generations[0].cause == "worker_lost: d: silent"


def test_without_the_setting_it_is_noticed_late() -> None:
    router = Loaded(P, D, D2, busy_ms=SILENT_MS)
    router.go_on(2 * OBSERVED_MS)
    router.go_on(SILENT_MS, D)
    assert router.dropped == []
    router.go_on(TICK_MS, D)
    assert [name for _, name in router.dropped] == ["d"]


def test_one_from_which_nothing_is_awaited_may_be_silent_for_longer() -> None:
    router = Loaded(P, D, D2)
    router.go_on(2 * OBSERVED_MS)
    router.go_on(SILENT_MS - TICK_MS, D2)
    assert router.dropped == []
    router.go_on(3 * TICK_MS, D2)
    assert [name for _, name in router.dropped] == ["d2"]


def test_one_that_is_often_silent_for_long_is_given_more_time() -> None:
    slow_ms = 6 * TICK_MS
    router = Loaded(P, D, D2)
    router.go_on(2 * OBSERVED_MS, beat_ms=slow_ms)
    heard_ms = router.now_ms - router.now_ms % slow_ms
    router.go_on(heard_ms + GAPS_MAX * slow_ms - router.now_ms, D)
    assert router.dropped == []
    router.go_on(TICK_MS, D)
    assert router.dropped == [(heard_ms + GAPS_MAX * slow_ms + TICK_MS, "d")]


def test_long_silences_are_forgotten_after_a_while() -> None:
    router = Loaded(P, D, D2)
    router.go_on(2 * OBSERVED_MS, beat_ms=10 * TICK_MS)
    router.go_on(2 * REMEMBERED_MS + 10_000)
    began_ms = router.now_ms
    router.go_on(BUSY_MS + TICK_MS, D)
    assert router.dropped == [(began_ms + BUSY_MS + TICK_MS, "d")]


def test_one_whose_rhythm_is_not_known_yet_is_not_judged_by_it() -> None:
    router = Loaded(P, D, D2)
    router.go_on(OBSERVED_MS - 2 * TICK_MS)
    router.go_on(SILENT_MS // 2, D)
    assert router.dropped == []


def test_work_that_an_idle_one_is_given_is_waited_for_from_then_on() -> None:
    router = Loaded(P, D, D2)
    router.go_on(2 * OBSERVED_MS)
    for info in (P, D, D2):  # it ends; from now on they are idle
        router.core.from_worker(router.now_ms, info.incarnation, STATS)
    router.core.cancel(router.now_ms, "r", "gone")
    quiet_ms = BUSY_MS - TICK_MS
    for _ in range(quiet_ms // TICK_MS):
        router.now_ms += TICK_MS
        router.tick()
    router.generate(request("s", max_tokens=100))
    given_ms = router.now_ms
    router.go_on(BUSY_MS, D)
    assert router.dropped == []
    router.go_on(TICK_MS, D)
    assert router.dropped == [(given_ms + BUSY_MS + TICK_MS, "d")]


@pytest.mark.parametrize("late_ms", [TICK_MS_MAX, 60_000])
def test_a_stall_of_the_router_makes_nobody_silent(late_ms: int) -> None:
    router = Loaded(P, D, D2)
    router.go_on(2 * OBSERVED_MS)
    router.now_ms += late_ms
    router.tick()  # what came meanwhile is read only after it
    assert router.dropped == []
    # A machine on which the router stalls is given more time; who died meanwhile is not overlooked.
    router.go_on((GAPS_MAX - 1) * TICK_MS_MAX, D)
    assert router.dropped == []
    router.go_on(2 * TICK_MS, D)
    assert [name for _, name in router.dropped] == ["d"]


def test_where_nobody_is_heard_the_router_suspects_itself() -> None:
    router = Loaded(P, D, D2)
    router.go_on(2 * OBSERVED_MS)
    router.go_on(SILENT_MS, P, D, D2)
    assert router.dropped == []
    router.go_on(TICK_MS, P, D, D2)
    assert {name for _, name in router.dropped} == {"p", "d", "d2"}


def test_one_that_comes_back_was_dropped_too_early_and_is_given_more_time() -> None:
    router = Loaded(P, D, D2)
    router.go_on(2 * OBSERVED_MS)
    router.go_on(3_000, D)
    assert [name for _, name in router.dropped] == ["d"]
    assert router.core.register(router.now_ms, D) == [Connect(D)]
    router.join(D, BUSY)
    router.core.session_lost(router.now_ms, D2.incarnation)  # the request is at D again
    router.dropped.clear()
    router.go_on(2 * OBSERVED_MS)
    router.go_on(SILENT_MS - 3 * BEAT_MS, D)
    assert router.dropped == []
    router.go_on(4 * BEAT_MS, D)
    assert [name for _, name in router.dropped] == ["d"]
