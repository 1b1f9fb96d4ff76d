"""An engine whose KV are symbols: reading a wrong, torn or unwritten block cannot go unnoticed.

A cell stands for one token's K and V in one group. It names its group and position, and carries a
digest of the whole prefix, as real KV depends on all of it. The next token is a function of every
cell that attention sees, so wrong KV gives wrong tokens, as a real model would; a cell of another
group or position is a violation at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.errors import InvariantViolation
from disagg.kv.block_pool import NULL_BLOCK
from disagg.kv.layout import KVCacheLayout
from disagg.kv.spec_names import window_tokens_of
from disagg.scheduling.sampling import SampledToken
from disagg.scheduling.step import SequenceSlice, Step, StepResult

VOCAB_SIZE = 997


@dataclass(frozen=True, slots=True)
class Cell:
    """One token's KV in one group."""

    group: int
    position: int
    digest: int


def extend_digest(digest: int, token: int) -> int:
    """Digest of a prefix from that of the prefix before its last token."""
    return hash((digest, token))


def first_seen(layout: KVCacheLayout, group: int, position: int) -> int:
    """First position that a query at ``position`` sees in a group."""
    window = window_tokens_of(layout.groups[group].spec)
    return max(0, position - window + 1) if window else 0


def choose(sums: Sequence[int]) -> int:
    """The next token, from the sum of the visible digests per group."""
    return hash(tuple(sums)) % VOCAB_SIZE


def expected_tokens(layout: KVCacheLayout, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What greedy decoding gives on a machine where nothing ever goes wrong."""
    sums, digest = [0], 0
    tokens = list(prompt)
    for position in range(len(prompt) + num_tokens - 1):
        digest = extend_digest(digest, tokens[position])
        sums.append(sums[-1] + digest)
        if position >= len(prompt) - 1:
            seen = [
                sums[position + 1] - sums[first_seen(layout, group, position)]
                for group in range(len(layout.groups))
            ]
            tokens.append(choose(seen))
    return tokens[len(prompt) :]


class SymbolicMemory:
    """The pool of one incarnation; ``blocks[id][offset]``."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[dict[int, Cell]] = [{} for _ in range(num_blocks)]


class SymbolicEngine:
    """Runs steps over a symbolic memory."""

    def __init__(self, layout: KVCacheLayout, memory: SymbolicMemory) -> None:
        self._layout = layout
        self._memory = memory

    def run(self, step: Step) -> StepResult:
        """Write the slices' cells, read what attention sees, choose the next tokens.

        Raises:
            InvariantViolation: a null, unwritten or foreign cell was read.
        """
        return StepResult(step.step_id, tuple(self._run(part) for part in step.slices))

    def _run(self, part: SequenceSlice) -> SampledToken | None:
        for position, token in enumerate(part.token_ids, part.start):
            before = self._read(part, 0, position - 1).digest if position else 0
            digest = extend_digest(before, token)
            for group in range(len(self._layout.groups)):
                block, offset = self._place(part, group, position)
                self._memory.blocks[block][offset] = Cell(group, position, digest)
        if part.sampling is None:
            return None
        last = part.start + len(part.token_ids) - 1
        sums = [
            sum(
                self._read(part, group, position).digest
                for position in range(first_seen(self._layout, group, last), last + 1)
            )
            for group in range(len(self._layout.groups))
        ]
        return SampledToken(choose(sums))

    def _place(self, part: SequenceSlice, group: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._layout.groups[group].spec.block_tokens)
        block = part.block_tables[group][index]
        if block == NULL_BLOCK:
            raise InvariantViolation(f"{part.key}: group {group} position {position} is null")
        return block, offset

    def _read(self, part: SequenceSlice, group: int, position: int) -> Cell:
        block, offset = self._place(part, group, position)
        cell = self._memory.blocks[block].get(offset)
        if cell is None or (cell.group, cell.position) != (group, position):
            raise InvariantViolation(
                f"{part.key}: block {block} holds {cell}, not group {group} position {position}"
            )
        return cell
