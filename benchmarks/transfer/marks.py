"""Times of events in a benchmark's node."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from disagg.scheduling.step import Step, StepResult


@dataclass
class Marks:
    """First and last time of each event of a request, in s of the machine's clock."""

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    def add(self, what: str) -> None:
        """Note that an event happened now."""
        now_s = time.monotonic()
        self.first.setdefault(what, now_s)
        self.last[what] = now_s


class MarkedEngine:
    """Notes the time of every step."""

    def __init__(self, mark: Callable[[Hashable, str], None], engine: Any) -> None:
        self._mark, self._engine = mark, engine
        self.steps: list[tuple[float, float]] = []

    def prepare(self, step: Step) -> None:
        """Prepare the step of the engine inside."""
        self._engine.prepare(step)

    def run(self, step: Step) -> StepResult:
        """Run the step of the engine inside."""
        for part in step.slices:
            self._mark(part.key, "step begins")
        begin_s = time.monotonic()
        result: StepResult = self._engine.run(step)
        self.steps.append((begin_s, time.monotonic()))
        for part in step.slices:
            self._mark(part.key, "step ended")
        return result
