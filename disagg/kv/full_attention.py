"""Full attention: everything stays visible, hits are downward-closed."""

import sys
from collections.abc import Sequence

from disagg.kv.manager import GroupManager


class FullAttentionManager(GroupManager):
    """Tables without nulls."""

    returns_blocks = False

    def skipped_tokens(self, num_computed: int) -> int:
        """Nothing is ever out of sight."""
        return 0

    def next_drop(self, num_skipped: int) -> int:
        """Never: no sequence is that long."""
        return sys.maxsize

    def kept_hits(self, hit: Sequence[int], num_computed: int) -> list[int]:
        """All of them."""
        return list(hit)

    def match(
        self,
        groups: Sequence[int],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        drop_last: bool,
    ) -> tuple[list[int], ...]:
        """Left-to-right run."""
        end = min(max_tokens // self.block_tokens, len(hashes))
        found: list[list[int]] = []
        for group in groups:
            found.append(self.pool.cache.leading_run(group, hashes, end))
            end = len(found[-1])
        end = max(0, end - drop_last)
        end -= end % (alignment_tokens // self.block_tokens)
        return tuple(run if len(run) == end else run[:end] for run in found)
