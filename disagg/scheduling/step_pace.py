"""When the next step is planned while one runs: early enough for the engine, late for newcomers."""

from collections import deque

from disagg.scheduling.step import Step

PLANNED_AT = 0.85
"""Share of the running step that has gone by. What is left is many times what planning takes."""


class StepPace:
    """Holds back the planning of the step after the running one.

    Who arrives while a step runs is in the next one if that one is not planned yet; planned at
    once, a hand-over or a new prompt would wait for a whole step more. A step is expected to take
    as long as the last one of about its size. Only time is lost by a wrong guess: the next step is
    planned early, or after the end of the running one.
    """

    def __init__(self) -> None:
        self._in_flight: deque[int] = deque()  # sizes
        self._took_ms: dict[int, float] = {}  # by size
        self._began_ms = 0.0

    def launched(self, now_ms: float, step: Step) -> None:
        """A step goes to the engine, which runs one after the other."""
        if not self._in_flight:
            self._began_ms = now_ms
        num_tokens = sum(len(part.token_ids) for part in step.slices)
        self._in_flight.append(num_tokens.bit_length())

    def done(self, now_ms: float) -> None:
        """The oldest step has ended; the next one in flight begins."""
        self._took_ms[self._in_flight.popleft()] = now_ms - self._began_ms
        self._began_ms = now_ms

    def wait_ms(self, now_ms: float) -> float:
        """How long to wait until the next step is planned; 0: not at all."""
        if len(self._in_flight) != 1:
            return 0.0
        expected_ms = self._took_ms.get(self._in_flight[0], 0.0)
        return max(0.0, self._began_ms + PLANNED_AT * expected_ms - now_ms)
