"""What a worker has measured counts less by the time in which it computes nothing."""

import pytest

from disagg.messages.step_times import PAIRS, StepShape, StepTimes
from disagg.routing.estimates.fading_mean import IDLE_HALF_LIFE_MS
from disagg.routing.estimates.place import StepCost
from disagg.routing.estimates.speeds import Speeds
from disagg.routing.index import PrefixIndex
from disagg.routing.worker import Worker
from disagg.routing.worker_bits import WorkerBits
from tests.unit.routing.builders import FULL, worker
from tests.unit.routing.measured import DECODES, PREFILLS, STEP_MS, TOKEN_MS, stats, step_times

SHAPE = StepShape(64, 0.0, 0, 0.0)


class Fleet:
    """Three workers, of which one prefills slowly.

    Attributes:
        slow: that one.
        usual: another one that prefills.
    """

    def __init__(self, slower: float) -> None:
        self.speeds = Speeds()
        self.usual, self.slow = self._known("usual"), self._known("slow")
        self._times = step_times(PREFILLS, slower)
        for one, times in (
            (self.usual, step_times(PREFILLS)),
            (self._known("decodes"), step_times(DECODES)),
            (self.slow, self._times),
        ):
            self.speeds.stats(0, one, stats(times))

    def _known(self, name: str) -> Worker:
        return Worker(worker(name, "both"), PrefixIndex((FULL,), 4, WorkerBits()), 0)

    def step(self, now_ms: float, slower: float) -> None:
        """The slow one says that it has computed one more."""
        old, features = self._times, SHAPE.features
        took_ms = slower * (STEP_MS + SHAPE.num_prefill_tokens * TOKEN_MS)
        self._times = StepTimes(
            old.num_steps + 1,
            tuple(
                a + features[i] * features[j] for a, (i, j) in zip(old.products, PAIRS, strict=True)
            ),
            tuple(a + b * took_ms for a, b in zip(old.timed, features, strict=True)),
            old.step_tokens_max,
        )
        self.speeds.stats(int(now_ms), self.slow, stats(self._times))

    def step_ms(self, who: Worker) -> float:
        """What such a step is expected to take."""
        cost = self.speeds.step_cost(who)
        assert isinstance(cost, StepCost)
        return cost.shape_ms(SHAPE)

    def average_ms(self) -> float:
        """What it is expected to take at a worker that has done nothing yet."""
        return self.step_ms(self._known("new"))


@pytest.mark.parametrize("every_ms", [0, IDLE_HALF_LIFE_MS // 2])
def test_who_was_slow_is_tried_again(every_ms: int) -> None:
    """Without work it sends no stats; with a little, stats of the little that it did."""
    fleet, end_ms = Fleet(slower=10), 12 * IDLE_HALF_LIFE_MS
    assert fleet.step_ms(fleet.slow) > 3 * fleet.step_ms(fleet.usual), "control"
    for now_ms in range(every_ms, end_ms, every_ms) if every_ms else ():
        fleet.step(now_ms, slower=1)
    fleet.speeds.now(end_ms)
    assert fleet.step_ms(fleet.slow) < 1.1 * fleet.average_ms()


def test_who_computes_all_the_time_forgets_nothing_for_it() -> None:
    """However long its steps take."""
    fleet, slower = Fleet(slower=100), 100
    before, now_ms = fleet.step_ms(fleet.slow), 0.0
    for _ in range(100):
        now_ms += slower * (STEP_MS + SHAPE.num_prefill_tokens * TOKEN_MS)
        fleet.step(now_ms, slower)
    assert now_ms > 5 * IDLE_HALF_LIFE_MS
    assert fleet.step_ms(fleet.slow) > 0.9 * before
