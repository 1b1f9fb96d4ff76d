"""Chunked-local attention: a position sees its own chunk only."""

from collections.abc import Sequence

from disagg.kv.block_pool import NULL_BLOCK, BlockPool
from disagg.kv.manager import GroupLimits, GroupManager
from disagg.kv.specs import ChunkedLocalSpec


class ChunkedLocalManager(GroupManager):
    """Tables that start with nulls up to the current chunk."""

    def __init__(
        self, group: int, spec: ChunkedLocalSpec, pool: BlockPool, limits: GroupLimits
    ) -> None:
        super().__init__(group, spec, pool, limits)
        self.chunk_tokens = spec.chunk_tokens

    def skipped_tokens(self, num_computed: int) -> int:
        """Everything before the chunk of position ``num_computed``."""
        return num_computed // self.chunk_tokens * self.chunk_tokens

    def next_drop(self, num_skipped: int) -> int:
        """When the first chunk begins that begins after the block."""
        end = (num_skipped + 1) * self.block_tokens
        return -(-end // self.chunk_tokens) * self.chunk_tokens

    def match(
        self,
        groups: Sequence[int],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        drop_last: bool,
    ) -> tuple[list[int], ...]:
        """Earlier chunks count as computed; in the current one a left-to-right run.

        A shorter end can lie in an earlier chunk, which must then be looked up in turn.
        """
        size = self.block_tokens
        per_alignment = alignment_tokens // size
        end = min(max_tokens // size, len(hashes))
        end -= end % per_alignment
        while True:
            first = min(self.skipped_tokens(end * size) // size, end)
            values = hashes[first:end]
            runs = [self.pool.cache.leading_run(group, values, end - first) for group in groups]
            reached = first + min(map(len, runs))
            reached -= reached % per_alignment
            if reached == end or reached == 0:
                break
            end = reached
        nulls = [NULL_BLOCK] * min(first, reached)
        return tuple((nulls + run)[:reached] for run in runs)
