"""When the next step is planned while one runs: early enough for the engine, late for newcomers."""

from collections import deque
from collections.abc import Mapping

from disagg.messages.step_times import StepShape, StepTimes
from disagg.scheduling.step import Step
from disagg.scheduling.step_meter import StepMeter, shape_of

PLANNED_AT = 0.85
"""Share of the running step that has gone by. What is left is many times what planning takes."""

PREFILL_TOKENS_MIN = 64
"""Steps of fewer tokens say little of how fast prompts are computed."""


class StepPace:
    """Holds back the planning of the step after the running one.

    Who arrives while a step runs is in the next one if that one is not planned yet; planned at
    once, a hand-over or a new prompt would wait for a whole step more. A step is expected to take
    as long as the last one of about its size. Only time is lost by a wrong guess: the next step is
    planned early, or after the end of the running one.

    Args:
        step_tokens_max: most tokens of a step here.
    """

    def __init__(self, step_tokens_max: int = 0) -> None:
        self._meter = StepMeter(step_tokens_max)
        self._in_flight: deque[tuple[int, StepShape]] = deque()  # tokens of each step
        self._took_ms: dict[int, float] = {}  # by size, the number of bits of the tokens
        self._began_ms = 0.0
        self._prefilled_ms = 0.0
        self._prefilled_tokens = 0

    @property
    def prefill_speed(self) -> Mapping[str, int]:
        """Microseconds and tokens of the steps of at least `PREFILL_TOKENS_MIN`, for the stats."""
        return {
            "prefill_step_us": int(self._prefilled_ms * 1000),
            "prefill_step_tokens": self._prefilled_tokens,
        }

    @property
    def step_times(self) -> StepTimes:
        """What the steps have taken by what they computed, for the stats."""
        return self._meter.times

    def launched(self, now_ms: float, step: Step) -> None:
        """A step goes to the engine, which runs one after the other."""
        if not self._in_flight:
            self._began_ms = now_ms
        num_tokens = sum(len(part.token_ids) for part in step.slices)
        self._in_flight.append((num_tokens, shape_of(step.slices)))

    def done(self, now_ms: float) -> None:
        """The oldest step has ended; the next one in flight begins."""
        num_tokens, shape = self._in_flight.popleft()
        took_ms = self._took_ms[num_tokens.bit_length()] = now_ms - self._began_ms
        if num_tokens >= PREFILL_TOKENS_MIN:
            self._prefilled_ms += took_ms
            self._prefilled_tokens += num_tokens
        self._meter.add(shape, took_ms)
        self._began_ms = now_ms

    def wait_ms(self, now_ms: float) -> float:
        """How long to wait until the next step is planned; 0: not at all."""
        if len(self._in_flight) != 1:
            return 0.0
        expected_ms = self._took_ms.get(self._in_flight[0][0].bit_length(), 0.0)
        return max(0.0, self._began_ms + PLANNED_AT * expected_ms - now_ms)
