"""What a step leaves for the next ones at an engine, besides KV and block tables.

A step is launched, and prepared, before the ones before it have ended. So the engine puts in the
tokens that were not known at the launch, and steps that were launched before a failure was known
meet sequences whose KV that failure has left incomplete: those sequences are lost, nothing of them
is computed until they begin anew, and nobody else's result is touched.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from disagg.errors import InvariantViolation
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SampledToken, TokenLogprobs
from disagg.scheduling.step import PLACEHOLDER, Step, StepResult

Batch = TypeVar("Batch")
"""A step as an engine has laid it out."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a slice with ``scored_token_ids`` brings: what it samples, and one for each of them."""

    sampled: SampledToken | None
    prompt_logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """What becomes of a slice that could not be computed, where its neighbours were."""

    error: str


SliceSamples = SampledToken | tuple[SampledToken, ...] | Scored | Failed | None
"""What a slice samples: nothing, a token, or of one with drafts a token for each and one more."""


class EngineSteps(Generic[Batch]):
    """Prepares an engine's steps and computes them, both in the order of their launch.

    Steps may be prepared on one thread while earlier ones are computed on another. Each of the two
    goes by what it has seen itself, in its own order; prepared steps alone pass between them.

    Args:
        lay_out: makes of a step all that can be made before the steps before it have ended, and
            forgets what the step ends even if it fails. Its tokens may be placeholders.
        compute: computes what was laid out; returns per slice what was sampled. The step it gets
            has known tokens, lacks the slices of sequences that were lost since, and ends also
            what steps ended that were not computed.
        failures: of either; they become the result's error. All others are raised.
    """

    def __init__(
        self,
        lay_out: Callable[[Step], Batch],
        compute: Callable[[Batch, Step], Sequence[SliceSamples]],
        failures: tuple[type[Exception], ...] = (Exception,),
    ) -> None:
        self._lay_out, self._compute = lay_out, compute
        self._failures = failures
        self._prepared: deque[_Prepared[Batch]] = deque()  # not more than are in flight
        self._planned, self._computed = _Sequences(), _Sequences()

    def __len__(self) -> int:
        """Sequences that something is kept of."""
        return len(self._planned.keys() | self._computed.keys())

    def prepare(self, step: Step) -> None:
        """Lay a step out. If that fails, it is the error of the step's result."""
        left = self._planned.left_of(step)
        if step.slices and not left.slices:
            self._prepared.append(_Prepared(step))
            return
        try:
            for part in left.slices:
                if part.is_placeholder and part.key not in self._planned.sampled:
                    raise ValueError(f"{part.key}: no token was sampled that could follow")
            self._planned.ended = ()
            batch = self._lay_out(left)
        except self._failures as error:
            self._planned.lose(part.key for part in left.slices)
            self._prepared.append(_Prepared(step, error=f"{type(error).__name__}: {error}"))
            return
        for part in left.slices:
            if part.num_drafts:
                self._planned.sampled.pop(part.key, None)
            elif part.sampling is not None:
                self._planned.sampled[part.key] = PLACEHOLDER
        self._prepared.append(_Prepared(step, batch))

    def run(self, step: Step) -> StepResult:
        """Compute what can be computed of a step; one that was not prepared is prepared first."""
        if not self._prepared:
            self.prepare(step)
        prepared = self._prepared.popleft()
        if prepared.step is not step:
            raise InvariantViolation(f"{step} is run where {prepared.step} was prepared")
        left = self._computed.left_of(step)
        if prepared.error:
            self._computed.lose(part.key for part in left.slices)
            return StepResult(step.step_id, error=prepared.error)
        if step.slices and not left.slices:
            return StepResult(step.step_id, (None,) * len(step.slices))
        sampled = self._computed.sampled
        slices = tuple(
            replace(part, token_ids=(sampled[part.key],)) if part.is_placeholder else part
            for part in left.slices
        )
        self._computed.ended = ()
        try:
            samples = self._compute(cast(Batch, prepared.batch), replace(left, slices=slices))
        except self._failures as error:
            self._computed.lose(part.key for part in left.slices)
            return StepResult(step.step_id, error=f"{type(error).__name__}: {error}")
        errors = {
            part.key: one.error
            for part, one in zip(slices, samples, strict=True)
            if isinstance(one, Failed)
        }
        self._computed.lose(errors)
        if slices and len(errors) == len(slices):
            return StepResult(step.step_id, error=next(iter(errors.values())))
        by_key: dict[RequestKey, SampledToken | None] = {}
        after_drafts: dict[RequestKey, tuple[SampledToken, ...]] = {}
        scored: dict[RequestKey, tuple[TokenLogprobs, ...]] = {}
        for part, one in zip(slices, samples, strict=True):
            if isinstance(one, Scored):
                scored[part.key] = one.prompt_logprobs
                one = one.sampled
            if isinstance(one, Failed):
                continue
            if isinstance(one, tuple):
                by_key[part.key], *after = one
                after_drafts[part.key] = tuple(after)
                sampled.pop(part.key, None)  # which one comes last is not known here
            elif one is not None:
                by_key[part.key] = one
                sampled[part.key] = one.token_id
        return StepResult(
            step.step_id,
            tuple([by_key.get(part.key) for part in step.slices]),
            after_drafts=tuple([after_drafts.get(part.key, ()) for part in step.slices])
            if after_drafts
            else (),
            prompt_logprobs=tuple([scored.get(part.key, ()) for part in step.slices])
            if scored
            else (),
            errors=tuple([errors.get(part.key, "") for part in step.slices]) if errors else (),
        )


@dataclass(frozen=True, slots=True)
class _Prepared(Generic[Batch]):
    """A step that waits to be computed; it has no batch if nothing of it can be."""

    step: Step
    batch: Batch | None = None
    error: str = ""


class _Sequences:
    """What is known of sequences that have not ended, after some step of the order of launch.

    Attributes:
        sampled: of each sequence the token that was sampled last; at the preparation, that one
            will have been. Nothing where it had drafts: no placeholder follows them.
        ended: what steps have ended that went no further than here; the next one ends it again.
    """

    def __init__(self) -> None:
        self.sampled: dict[RequestKey, int] = {}
        self.ended: tuple[RequestKey, ...] = ()
        self._lost: set[RequestKey] = set()

    def keys(self) -> set[RequestKey]:
        return self.sampled.keys() | self._lost

    def left_of(self, step: Step) -> Step:
        """What is left of the next step: the slices of sequences that are not lost."""
        for key in step.ended:
            self._forget(key)
        for part in step.slices:
            if part.is_new:
                self._forget(part.key)
        self.ended += step.ended
        slices = tuple([part for part in step.slices if part.key not in self._lost])
        return Step(step.step_id, slices, self.ended)

    def lose(self, keys: Iterable[RequestKey]) -> None:
        """Take note that a step failed for these sequences."""
        self._lost.update(keys)

    def _forget(self, key: RequestKey) -> None:
        self.sampled.pop(key, None)
        self._lost.discard(key)
