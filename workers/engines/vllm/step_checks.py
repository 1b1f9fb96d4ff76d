"""What a step must keep to, or it would break the batch of vLLM's runner; checked before it."""

from array import array
from collections.abc import Sequence
from typing import Protocol

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.kinds.kind import Spec
from disagg.messages.identity import RequestKey
from disagg.scheduling.block_tables import BlockTables
from disagg.scheduling.step import SequenceSlice, Step


class Holds(Protocol):
    """Which sequences the runner holds."""

    def __contains__(self, key: RequestKey) -> bool:
        """Whether this one was sent and has not ended."""
        ...


class StepChecks:
    """The limits of one engine.

    Args:
        specs: of the groups.
        max_step_tokens: of all slices together.
        max_sequences: slices of a step.
        max_model_tokens: of a sequence; the runner needs a place for the token after a slice.
        vocab_size: token ids are below it.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        max_step_tokens: int,
        max_sequences: int,
        max_model_tokens: int,
        vocab_size: int,
    ) -> None:
        self._specs = tuple(specs)
        self._max_step_tokens = max_step_tokens
        self._max_sequences = max_sequences
        self._max_model_tokens = max_model_tokens
        self._vocab_size = vocab_size

    def check(self, step: Step, tables: BlockTables, held: Holds) -> None:
        """Check a step whose table changes have been made, in time linear in what is new.

        Raises:
            ValueError: the runner must not get it.
        """
        num_tokens = sum(len(part.token_ids) for part in step.slices)
        if not 0 < num_tokens <= self._max_step_tokens or len(step.slices) > self._max_sequences:
            raise ValueError(
                f"{len(step.slices)} slices of {num_tokens} tokens: at most"
                f" {self._max_sequences} of {self._max_step_tokens} can be computed"
            )
        if len({part.key for part in step.slices}) < len(step.slices):
            raise ValueError("a sequence has two slices")
        for index, part in enumerate(step.slices):
            problem = self._problem_of_tokens(part)
            if not problem and not part.is_new and part.key not in held:
                problem = f"the runner does not hold {part.key}"
            if problem := problem or self._problem_of_tables(part, tables[part.key]):
                raise ValueError(f"slice {index}: {problem}")

    def _problem_of_tokens(self, part: SequenceSlice) -> str:
        end = part.start + len(part.token_ids)
        if not part.token_ids or part.start < 0 or end >= self._max_model_tokens:
            return (
                f"positions {part.start}..{end} do not lie in"
                f" 0..{self._max_model_tokens - 1}, or are none"
            )
        # Of a new sequence the runner takes all tokens.
        tokens = part.known_token_ids if part.is_new else part.token_ids
        if part.is_new and not end <= len(tokens) <= self._max_model_tokens:
            return f"{len(tokens)} tokens are known of a sequence up to {end}"
        if (part.is_new or not part.is_placeholder) and not 0 <= min(tokens) <= max(
            tokens
        ) < self._vocab_size:
            return f"token id out of 0..{self._vocab_size - 1}"
        scored = part.scored_token_ids
        if len(scored) > len(part.token_ids):
            return f"{len(scored)} tokens to score behind {len(part.token_ids)}"
        if scored and not 0 <= min(scored) <= max(scored) < self._vocab_size:
            return f"token id to score out of 0..{self._vocab_size - 1}"
        bias = part.sampling.logit_bias if part.sampling else ()
        if bias and not 0 <= bias[0][0] <= bias[-1][0] < self._vocab_size:
            return f"token id with a bias out of 0..{self._vocab_size - 1}"
        return ""

    def _problem_of_tables(self, part: SequenceSlice, tables: "Sequence[array[int]]") -> str:
        """Nulls stand before the window alone, so its first entry and the new ones tell.

        A table that has not changed has been looked at: its last entry is enough.
        """
        end = part.start + len(part.token_ids)
        for group, (spec, table) in enumerate(zip(self._specs, tables, strict=True)):
            num_needed = -(-end // spec.block_tokens)
            if len(table) < num_needed:
                return f"group {group}: the block table ends before block index {num_needed - 1}"
            if table[num_needed - 1] == NULL_BLOCK:
                return f"group {group}: null block where the slice ends"
            if not part.table_changes:
                continue
            seen = spec.first_seen(part.start)
            if seen is None:  # a state: the one before the slice; the one after it is the last
                before = (part.start - 1) // spec.block_tokens if part.start else num_needed - 1
                if table[before] == NULL_BLOCK:
                    return f"group {group}: null block where a state must be"
                continue
            first = seen // spec.block_tokens
            num_old = len(table) - len(part.table_changes[group].new_blocks)
            if table[first] == NULL_BLOCK or NULL_BLOCK in table[max(first, num_old) :]:
                return f"group {group}: null block at an in-window block index"
        return ""
