"""An engine whose KV are symbols: reading a wrong, torn or unwritten block cannot go unnoticed.

A cell stands for one token's K and V in one group, or for a part of a linear state. It names its
group and position, and carries a digest of all that it was computed from, as real KV does. The
next token is a function of every cell that is seen, so wrong KV gives wrong tokens, as in a real
model; a cell of another group or position, and a state whose parts do not belong together, is a
violation at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.errors import InvariantViolation
from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.sampling import SampledToken, TokenLogprobs
from disagg.scheduling.block_tables import BlockTables, Tables
from disagg.scheduling.engine_steps import EngineSteps, Scored, SliceSamples
from disagg.scheduling.step import SequenceSlice, Step, StepResult
from disagg.testing.simulation.symbolic_kinds import GroupHistory, digest_of

VOCAB_SIZE = 997


@dataclass(frozen=True, slots=True)
class Cell:
    """One token's KV in one group, or one block of a state."""

    group: int
    position: int
    """Of the token; for a state, the number of tokens it stands for."""
    digest: int
    part: int = 0
    """Which of a state's blocks."""


def expected_tokens(
    layout: KVCacheLayout, prompt: Sequence[int], num_tokens: int, vocab_size: int = VOCAB_SIZE
) -> list[int]:
    """What greedy decoding gives on a machine where nothing ever goes wrong."""
    histories = [GroupHistory(group.spec) for group in layout.groups]
    tokens = list(prompt)
    for position in range(len(prompt) + num_tokens - 1):
        digest = digest_of(tokens[position], tuple(one.seen(position) for one in histories))
        for history in histories:
            history.append(digest)
        if position >= len(prompt) - 1:
            tokens.append(digest % vocab_size)
    return tokens[len(prompt) :]


def expected_scores(
    layout: KVCacheLayout, prompt: Sequence[int], vocab_size: int = VOCAB_SIZE
) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities of a prompt on such a machine; its first token has none."""
    histories = [GroupHistory(group.spec) for group in layout.groups]
    scores: list[TokenLogprobs | None] = [None]
    for position, target in enumerate(prompt[1:]):
        digest = digest_of(prompt[position], tuple(one.seen(position) for one in histories))
        for history in histories:
            history.append(digest)
        scores.append(_score(digest, target, vocab_size))
    return tuple(scores)


def _score(digest: int, target: int, vocab_size: int) -> TokenLogprobs:
    """Of a token, by all that stands before it."""
    return TokenLogprobs(-float(digest % vocab_size), ((target, 0.0),), 1)


class SymbolicMemory:
    """The pool of one incarnation; ``blocks[id][offset]``."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[dict[int, Cell]] = [{} for _ in range(num_blocks)]


class SymbolicEngine:
    """Runs steps over a symbolic memory."""

    def __init__(
        self, layout: KVCacheLayout, memory: SymbolicMemory, vocab_size: int = VOCAB_SIZE
    ) -> None:
        self._layout = layout
        self._vocab_size = vocab_size
        self._memory = memory
        self._steps = EngineSteps(self._lay_out, self._compute, ())
        self._tables = BlockTables(len(layout.groups), len(memory.blocks))
        self._laid_out: Tables = {}
        """Of the step that is computed: a later one may have ended a sequence of it already."""

    def prepare(self, step: Step) -> None:
        """Make the step's table changes; earlier ones may not have been run."""
        self._steps.prepare(step)

    def run(self, step: Step) -> StepResult:
        """Read what is seen, write the slices' cells and the states after them, choose tokens.

        Raises:
            InvariantViolation: a null, unwritten or foreign cell was read or would be written.
        """
        return self._steps.run(step)

    def _lay_out(self, step: Step) -> Tables:
        self._tables.apply(step)
        return self._tables.of(step.slices)

    def _compute(self, tables: Tables, step: Step) -> list[SliceSamples]:
        self._laid_out = tables
        return [self._run(part) for part in step.slices]

    def _run(self, part: SequenceSlice) -> SliceSamples:
        groups = range(len(self._layout.groups))
        histories = [self._history(part, group) for group in groups]
        sampled: list[SampledToken] = []
        scores: list[TokenLogprobs] = []
        targets = iter(part.scored_token_ids)
        for position, token in enumerate(part.token_ids, part.start):
            digest = digest_of(token, tuple(one.seen(position) for one in histories))
            sampled.append(SampledToken(digest % self._vocab_size))
            if (target := next(targets, None)) is not None:
                scores.append(_score(digest, target, self._vocab_size))
            for group, history in enumerate(histories):
                history.append(digest)
                if self._layout.groups[group].spec.first_seen(position) is not None:
                    block, offset = self._place(part, group, position)
                    self._memory.blocks[block][offset] = Cell(group, position, digest)
        end = part.start + len(part.token_ids)
        for group, history in enumerate(histories):
            if self._layout.groups[group].spec.first_seen(end) is None:
                for number, block in enumerate(self._state_blocks(part, group, end)):
                    self._memory.blocks[block][0] = Cell(group, end, history.state, number)
        if scores:
            return Scored(sampled[-1] if part.sampling else None, tuple(scores))
        if part.sampling is None:
            return None
        return tuple(sampled[-1 - part.num_drafts :]) if part.num_drafts else sampled[-1]

    def _history(self, part: SequenceSlice, group: int) -> GroupHistory:
        """What the slice's first token sees, read from the blocks."""
        spec, start = self._layout.groups[group].spec, part.start
        first = spec.first_seen(start)
        if first is not None:
            seen = tuple(self._read(part, group, at).digest for at in range(first, start))
            return GroupHistory(spec, start, seen)
        if start == 0:
            return GroupHistory(spec)
        blocks = self._state_blocks(part, group, start)
        parts = [self._cell(part, block, 0, (group, start, n)) for n, block in enumerate(blocks)]
        digests = {cell.digest for cell in parts}
        if len(digests) > 1:
            raise InvariantViolation(f"{part.key}: blocks {blocks} are parts of several states")
        return GroupHistory(spec, start, tuple(digests))

    def _place(self, part: SequenceSlice, group: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._layout.groups[group].spec.block_tokens)
        block = self._laid_out[part.key][group][index]
        if block == NULL_BLOCK:
            raise InvariantViolation(f"{part.key}: group {group} position {position} is null")
        return block, offset

    def _state_blocks(self, part: SequenceSlice, group: int, num_tokens: int) -> Sequence[int]:
        """Of the state after so many tokens; it is updated in place up to its block's end."""
        size = self._layout.groups[group].blocks_per_state
        index = (num_tokens - 1) // self._layout.groups[group].spec.block_tokens * size
        blocks = self._laid_out[part.key][group][index : index + size]
        if len(blocks) < size or NULL_BLOCK in blocks:
            raise InvariantViolation(f"{part.key}: group {group} has no state at {num_tokens}")
        return blocks

    def _read(self, part: SequenceSlice, group: int, position: int) -> Cell:
        block, offset = self._place(part, group, position)
        return self._cell(part, block, offset, (group, position, 0))

    def _cell(
        self, part: SequenceSlice, block: int, offset: int, wanted: tuple[int, int, int]
    ) -> Cell:
        cell = self._memory.blocks[block].get(offset)
        if cell is None or (cell.group, cell.position, cell.part) != wanted:
            raise InvariantViolation(
                f"{part.key}: block {block} holds {cell}, not (group, position, part) {wanted}"
            )
        return cell
