"""Workers with a rule of two steps in flight taken away."""

from collections.abc import Hashable, Iterable

from disagg.kv.blocks.step_holds import StepHolds
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.scheduling.batcher import Batcher
from disagg.scheduling.sequence import Sequence
from disagg.scheduling.step import Step


class PublishesWhatIsScheduled(KVCacheCoordinator):
    """With a step's tokens those of the step behind it enter the prefix cache."""

    def publish_step(self, parts: Iterable[tuple[Hashable, int]]) -> None:
        super().publish_step([(key, self.num_scheduled_tokens(key)) for key, _ in parts])


class StepsEndTogether(StepHolds):
    """When a step has ended, the one behind it holds nothing any more."""

    def end(self, step: Hashable) -> None:
        for one in list(self._keys):
            super().end(one)


class SchedulesPastTheSeal(Batcher):
    """A prefill that hands over goes on with the token that its last step samples."""

    def run(self, seq: Sequence) -> None:
        seq.num_scheduled_max = seq.num_tokens_max - 1
        super().run(seq)


class PreemptsWhileStepsRun(Batcher):
    """Takes the blocks of who is being sampled for."""

    def preempt(self, seq: Sequence) -> None:
        in_flight, self._in_flight = self._in_flight, type(self._in_flight)()
        super().preempt(seq)
        self._in_flight = in_flight

    def build_step(self) -> tuple[Step | None, list[Sequence]]:
        in_flight, self._in_flight = self._in_flight, type(self._in_flight)()
        step, preempted = super().build_step()
        in_flight.extend(self._in_flight)
        self._in_flight = in_flight
        return step, preempted
