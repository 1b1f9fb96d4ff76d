"""What a step leaves for the next ones at an engine, besides KV and block tables.

A step is launched before the one before it has ended. So the engine puts in the tokens that were
not known at the launch, and steps that were launched before a failure was known meet sequences
whose KV that failure has left incomplete: those sequences are lost, nothing of them is computed
until they begin anew, and nobody else's result is touched.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SampledToken
from disagg.scheduling.step import PLACEHOLDER, SequenceSlice, Step, StepResult

Compute = Callable[[Step], Sequence[SampledToken | None]]
"""Computes a step of known tokens; returns one sample or None per slice."""


class EngineSteps:
    """Runs an engine's steps in the order of their launch."""

    def __init__(self) -> None:
        self._sampled: dict[RequestKey, int] = {}
        """Of each sequence the token that was sampled last."""
        self._lost: set[RequestKey] = set()
        self._ended: tuple[RequestKey, ...] = ()
        """What steps have named that were not computed; the next one names it again."""

    def __len__(self) -> int:
        return len(self._sampled.keys() | self._lost)

    def run(
        self, step: Step, compute: Compute, failures: tuple[type[Exception], ...] = (Exception,)
    ) -> StepResult:
        """Compute what can be computed of a step.

        Args:
            step: as it was launched.
            compute: gets it without placeholders and without sequences that are lost.
            failures: of ``compute``; they become the result's error. All others are raised.
        """
        for key in step.ended:
            self._forget(key)
        for part in step.slices:
            if part.is_new:
                self._forget(part.key)
        self._ended += step.ended
        slices = [part for part in step.slices if part.key not in self._lost]
        if step.slices and not slices:
            return StepResult(step.step_id, (None,) * len(step.slices))
        try:
            known = tuple([self._known(part) for part in slices])
            samples = compute(Step(step.step_id, known, self._ended))
        except failures as error:
            self._lost.update(part.key for part in slices)
            return StepResult(step.step_id, error=f"{type(error).__name__}: {error}")
        self._ended = ()
        sampled = dict(zip([part.key for part in slices], samples, strict=True))
        for key, sample in sampled.items():
            if sample is not None:
                self._sampled[key] = sample.token_id
        return StepResult(step.step_id, tuple([sampled.get(part.key) for part in step.slices]))

    def _known(self, part: SequenceSlice) -> SequenceSlice:
        if not part.token_ids or part.token_ids[0] != PLACEHOLDER:
            return part
        if part.key not in self._sampled:
            raise ValueError(f"{part.key}: no token was sampled that could follow")
        return replace(part, token_ids=(self._sampled[part.key],))

    def _forget(self, key: RequestKey) -> None:
        self._sampled.pop(key, None)
        self._lost.discard(key)
