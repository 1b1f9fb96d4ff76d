"""One step of the engine: what the scheduler asks for and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence that are computed in a step.

    ``token_ids`` stand at positions ``start .. start + len(token_ids)``; everything before
    ``start`` is already in the pool (as far as the group's window reaches).
    """

    key: RequestKey
    token_ids: Sequence[int] = field(repr=False)
    start: int
    block_tables: tuple[Sequence[int], ...]
    """Per group: block id of each block position from token 0 to at least the slice's end;
    ``disagg.kv.blocks.block_pool.NULL_BLOCK`` at positions out of the window. Never read through a
    null entry."""
    sampling: SamplingParams | None = None
    """None: nothing is sampled (a chunk that is not the last of its prompt)."""


@dataclass(frozen=True, slots=True)
class Step:
    """A packed batch: decode tokens and prefill chunks of any number of sequences."""

    step_id: int
    slices: tuple[SequenceSlice, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a step; ``samples`` is parallel to the step's slices.

    With ``error`` set nothing of the step may be published or emitted.
    """

    step_id: int
    samples: tuple[SampledToken | None, ...] = ()
    error: str = ""
