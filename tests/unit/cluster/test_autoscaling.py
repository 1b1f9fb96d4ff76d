"""The automatic mode against a simulated queue: it converges, and does not oscillate."""

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from disagg.cluster import autoscaling
from disagg.cluster.autoscaling import AutoscaleOptions, Autoscaling, Wait, queue_time
from disagg.cluster.counts import Counts

OPTIONS = AutoscaleOptions(
    ranges={"prefill": (1, 8)}, target_queue_ms=2_000, up_after_ms=10_000, down_after_ms=60_000
)
POLL_MS = 4_000
HOUR_MS = 3_600_000


@dataclass
class Simulated:
    """One role's workers, each of which serves so many requests a second, and one queue.

    Attributes:
        per_worker: requests that a worker serves in a second.
        start_ms: how long a new worker takes before it serves.
        changes: number of workers at each time it changed.
    """

    options: AutoscaleOptions = OPTIONS
    per_worker: float = 5.0
    start_ms: int = 40_000
    seed: int = 0
    counts: Counts = field(default_factory=lambda: Counts(1, 1))
    now_ms: int = 0
    changes: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scaling = Autoscaling(self.options)
        self.draw = random.Random(self.seed)
        self.starting: list[int] = []
        self.queue: deque[int] = deque()
        self.served: list[Wait] = []
        self.room = 0.0

    @property
    def num_ready(self) -> int:
        return self.counts.prefill - len(self.starting)

    def run(self, rate: float, duration_ms: int) -> None:
        """Requests come, so many a second and at random, for a while."""
        end_ms = self.now_ms + duration_ms
        while self.now_ms < end_ms:
            self.now_ms += POLL_MS
            self._come(rate)
            self._serve()
            waiting = [Wait(came, self.now_ms - came) for came in self.queue]
            wanted = self.scaling.decide(
                self.now_ms,
                self.counts,
                {"prefill": self.num_ready, "decode": 1},
                {"prefill": [*self.served, *waiting], "decode": []},
            )
            if wanted != self.counts:
                self._change(wanted)

    def _come(self, rate: float) -> None:
        mean = rate * POLL_MS / 1000
        number = max(0, round(self.draw.gauss(mean, mean**0.5)))
        times = sorted(self.draw.randrange(POLL_MS) for _ in range(number))
        self.queue.extend(self.now_ms - POLL_MS + time for time in times)

    def _serve(self) -> None:
        self.starting = [time for time in self.starting if time > self.now_ms]
        self.room = min(self.room, 1.0) + self.num_ready * self.per_worker * POLL_MS / 1000
        self.served = []
        while self.queue and self.room >= 1:
            came = self.queue.popleft()
            self.room -= 1
            self.served.append(Wait(came, max(0, self.now_ms - POLL_MS - came)))

    def _change(self, wanted: Counts) -> None:
        assert wanted.decode == self.counts.decode, "a role without a range is left alone"
        step = wanted.prefill - self.counts.prefill
        assert abs(step) == 1, "one step at a time"
        if step > 0:
            assert not self.starting, "a cold start is waited for"
            self.starting.append(self.now_ms + self.start_ms)
        self.counts = wanted
        self.changes.append((self.now_ms, wanted.prefill))


@pytest.mark.parametrize("rate", [2.0, 13.5, 31.0])
@pytest.mark.parametrize("seed", range(2))
def test_constant_load_ends_at_what_it_needs_and_stays(rate: float, seed: int) -> None:
    system = Simulated(seed=seed)
    system.run(rate, 4 * HOUR_MS)
    needed = int(rate / system.per_worker) + 1
    assert system.counts.prefill in (needed, needed + 1), system.changes
    # Up in steps; then tries of one fewer, each twice as late as the one before.
    assert len(system.changes) <= needed + 8 + 4 * 14, system.changes
    per_try_ms = OPTIONS.down_after_ms << autoscaling.FAILED_MAX
    late = [time for time, _ in system.changes if time > 2 * HOUR_MS]
    assert len(late) <= 4 * (2 * HOUR_MS // per_try_ms + 1), system.changes


def test_after_a_step_of_the_load_it_converges_and_back() -> None:
    system = Simulated()
    system.run(4.0, HOUR_MS)
    assert system.counts.prefill == 1
    system.run(18.0, HOUR_MS)
    assert system.counts.prefill in (4, 5), system.changes
    assert not system.queue or system.now_ms - system.queue[0] < OPTIONS.target_queue_ms
    system.run(4.0, 2 * HOUR_MS)
    assert system.counts.prefill == 1, system.changes


def num_changes_without(monkeypatch: pytest.MonkeyPatch, **broken: float) -> tuple[int, int]:
    """Changes in 4 hours of a load between two counts, as it is and with a rule taken away."""
    whole = Simulated()
    whole.run(13.5, 4 * HOUR_MS)
    for name, value in broken.items():
        monkeypatch.setattr(autoscaling, name, value)
    without = Simulated()
    without.run(13.5, 4 * HOUR_MS)
    return len(whole.changes), len(without.changes)


def test_without_its_memory_of_failed_tries_it_oscillates(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, without = num_changes_without(monkeypatch, FAILED_MAX=0)
    assert without > 4 * whole


def test_without_hysteresis_it_oscillates_more(monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = replace(OPTIONS, up_after_ms=0, down_after_ms=0)
    system = Simulated(options=hasty)
    system.run(13.5, HOUR_MS)
    calm = Simulated()
    calm.run(13.5, HOUR_MS)
    assert len(system.changes) > 4 * len(calm.changes)


def scaled(waits: list[Wait], ready: int, now_ms: int, scaling: Autoscaling) -> int:
    return scaling.decide(now_ms, Counts(2, 1), {"prefill": ready}, {"prefill": waits}).prefill


def test_while_a_worker_is_to_come_there_is_no_second_one() -> None:
    scaling = Autoscaling(OPTIONS)
    for now_ms in range(0, 600_000, POLL_MS):
        assert scaled([Wait(0, 60_000)], 1, now_ms, scaling) == 2


def test_a_worker_that_never_comes_is_given_up_when_nobody_waits() -> None:
    """No host has room for it, or it ends as often as it starts."""
    scaling, low_ms = Autoscaling(OPTIONS), OPTIONS.down_after_ms
    busy = [Wait(0, OPTIONS.target_queue_ms // 2)]
    assert {scaled(busy, 1, now, scaling) for now in range(0, HOUR_MS, POLL_MS)} == {2}
    times = iter(range(HOUR_MS, 2 * HOUR_MS, POLL_MS))
    given_up_ms = next(now for now in times if scaled([], 1, now, scaling) == 1)
    assert given_up_ms - HOUR_MS == low_ms
    # Its long way is no time that a queue is given to be worked off.
    late = {"prefill": [Wait(given_up_ms + POLL_MS, 60_000)]}
    steps = range(given_up_ms + POLL_MS, given_up_ms + 60_000, POLL_MS)
    found = {scaling.decide(now, Counts(1, 1), {"prefill": 1}, late).prefill for now in steps}
    assert found == {1, 2}


def test_who_waited_for_a_cold_start_does_not_count() -> None:
    scaling, late = Autoscaling(OPTIONS), Autoscaling(OPTIONS)
    assert scaled([], 1, 100_000, scaling) == 2
    old = [Wait(90_000, 50_000)]
    for now_ms in range(102_000, 160_000, POLL_MS):
        assert scaled(old, 2, now_ms, scaling) == 2
    # The control: the same without a cold start is a reason.
    found = {scaled(old, 2, now_ms, late) for now_ms in range(102_000, 160_000, POLL_MS)}
    assert found == {2, 3}


def test_a_queue_that_becomes_shorter_by_itself_is_waited_for() -> None:
    shrinking, standing = Autoscaling(OPTIONS), Autoscaling(OPTIONS)
    for now_ms in range(0, 60_000, POLL_MS):
        assert scaled([Wait(now_ms, 90_000 - now_ms)], 2, now_ms, shrinking) == 2
    found = {scaled([Wait(t, 90_000)], 2, t, standing) for t in range(0, 60_000, POLL_MS)}
    assert found == {2, 3}


def test_without_news_of_the_load_nothing_changes() -> None:
    scaling = Autoscaling(OPTIONS)
    for now_ms in range(0, HOUR_MS, POLL_MS):
        assert scaling.decide(now_ms, Counts(2, 1), {"prefill": 2}, None) == Counts(2, 1)


def test_counts_outside_their_range_come_into_it() -> None:
    options = replace(OPTIONS, ranges={"prefill": (2, 4), "decode": (1, 3)})
    scaling = Autoscaling(options)
    assert scaling.decide(0, Counts(1, 9), {}, None) == Counts(2, 3)
    assert scaling.reasons == {
        "prefill": "prefill has a range of 2-4",
        "decode": "decode has a range of 1-3",
    }


def test_the_queue_time_is_that_of_most_requests() -> None:
    waits = [Wait(number, number) for number in range(100)]
    assert queue_time(waits, 0) == 90
    assert queue_time(waits, 95) == 99
    assert queue_time(waits, 1_000) == 0
