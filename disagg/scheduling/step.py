"""One step of the engine: the scheduler's order, and the engine's result."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SampledToken, SamplingParams, TokenLogprobs

PLACEHOLDER = -1
"""In place of a token id: the token that is sampled for this sequence in the last step before this
one that it is in. It is not known yet, as that step has not ended; the engine will know it."""


@dataclass(frozen=True, slots=True)
class TableChange:
    """How a sequence's block table in one group differs from what the engine has of it.

    Attributes:
        num_skipped: leading entries that are null from now on; never fewer than before.
        new_blocks: block ids to append; ``NULL_BLOCK`` (see `disagg.kv.blocks.block_pool`) where
            nothing is kept.
    """

    num_skipped: int
    new_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, repr=False)
class SequenceSlice:
    """The tokens of one sequence that are computed in a step.

    ``token_ids`` stand at positions ``start .. start + len(token_ids)``: known ones, drafts behind
    them, or a single `PLACEHOLDER`. Everything before ``start`` is in the pool (as far as the
    group's window reaches) when the steps before this one have ended.
    """

    key: RequestKey
    token_ids: Sequence[int] = field(repr=False)
    start: int
    is_new: bool
    """The sequence starts anew: the engine has nothing of its block tables, or must forget it."""
    table_changes: tuple[TableChange, ...]
    """One per group, to be made before the slice is computed; empty if no table has changed.

    After them a table holds the block id of each block index from token 0 to at least the
    slice's end, null where it left the window. Never read through a null entry."""
    sampling: SamplingParams | None = None
    """None: nothing is sampled (a chunk that is not the last of its prompt)."""
    known_token_ids: Sequence[int] = field(default=(), repr=False)
    """Of a sequence that ``is_new``: all its tokens, those before ``start`` and after the slice
    included. An engine that keeps sequences needs no more of them later."""
    num_drafts: int = 0
    """Its last tokens, as many as this, may be wrong; KV of wrong ones is written again. A token is
    sampled after the last known one and after each draft, as if all before it were right. What
    follows is in no step before this one has ended."""

    scored_token_ids: Sequence[int] = field(default=(), repr=False)
    """The prompt's tokens behind the slice's first ones: number i stands at ``start + i + 1``. What
    the model thinks of them, after all before each, is wanted."""
    num_prompt_logprobs: int = 0
    """Of as many of the best tokens too, at each of these places."""

    @property
    def is_placeholder(self) -> bool:
        """Whether its token is not known yet."""
        return len(self.token_ids) == 1 and self.token_ids[0] == PLACEHOLDER

    def __repr__(self) -> str:
        """Counts only: token ids stay out of logs and errors."""
        return f"<{len(self.token_ids)} tokens of {self.key} from {self.start}>"


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """A packed batch: decode tokens and prefill chunks of any number of sequences."""

    step_id: int
    slices: tuple[SequenceSlice, ...]
    ended: tuple[RequestKey, ...] = ()
    """Sequences of earlier steps whose block tables the engine forgets, before it looks at the
    slices."""

    def __repr__(self) -> str:
        """Counts only: token ids stay out of logs and errors."""
        num_tokens = sum(len(part.token_ids) for part in self.slices)
        return f"<step {self.step_id}: {len(self.slices)} slices, {num_tokens} tokens>"


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a step; ``samples`` is parallel to the step's slices.

    With ``error`` set nothing of the step may be published or emitted, with an entry of ``errors``
    nothing of that slice.
    """

    step_id: int
    samples: tuple[SampledToken | None, ...] = ()
    error: str = ""
    after_drafts: tuple[tuple[SampledToken, ...], ...] = ()
    """Parallel to the slices too, if one has drafts: what was sampled after each of them."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """Parallel to the slices, if one has ``scored_token_ids``: one for each of them."""
    errors: tuple[str, ...] = ()
    """Parallel to the slices, if some failed and others did not: why, or ""."""
