"""Sliding window: only the last ``window_tokens - 1`` tokens before a query matter."""

from collections.abc import Sequence

from disagg.kv.block_pool import NULL_BLOCK, BlockPool
from disagg.kv.manager import GroupLimits, GroupManager
from disagg.kv.specs import SlidingWindowSpec

_PROBES = 16
"""Blocks of a candidate that are probed one by one before all of them are."""


class SlidingWindowManager(GroupManager):
    """Tables that start with nulls; position p sees ``p - window_tokens + 1 .. p``."""

    def __init__(
        self, group: int, spec: SlidingWindowSpec, pool: BlockPool, limits: GroupLimits
    ) -> None:
        super().__init__(group, spec, pool, limits)
        self.window_tokens = spec.window_tokens
        self.num_window_blocks = self.num_blocks(spec.window_tokens - 1)

    def skipped_tokens(self, num_computed: int) -> int:
        """Positions before ``num_computed - window_tokens + 1``."""
        return max(0, num_computed - self.window_tokens + 1)

    def next_drop(self, num_skipped: int) -> int:
        """When the block's last position leaves the window."""
        return (num_skipped + 1) * self.block_tokens + self.window_tokens - 1

    def match(
        self,
        groups: Sequence[int],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        drop_last: bool,
    ) -> tuple[list[int], ...]:
        """Right-most aligned end before which the whole window (or everything) is cached.

        A missing block rules out every end whose window covers it, so the next candidate ends
        there: as in Boyer and Moore's search, a total miss takes one probe per window.
        """
        indexes = [self.pool.index(group) for group in groups]
        extra = int(drop_last)
        per_alignment = alignment_tokens // self.block_tokens
        need = self.num_window_blocks + extra
        probe = indexes[0]

        limit = min(max_tokens // self.block_tokens, len(hashes))
        while True:
            end = (limit - extra) // per_alignment * per_alignment + extra
            if end <= extra:
                return tuple([] for _ in indexes)
            first = end - need if end > need else 0
            for limit in range(first, min(first + _PROBES, end)):
                if hashes[limit] not in probe:
                    break
            else:
                window = hashes[first:end]
                runs = [list(map(index.get, window)) for index in indexes]
                missing = [run.index(None) for run in runs if None in run]
                if not missing:
                    break
                limit = first + min(missing)
            while limit >= need > 0 and hashes[limit - need] not in probe:
                limit -= need
        nulls: list[int | None] = [NULL_BLOCK] * first
        return tuple((nulls + run)[: end - extra] for run in runs)  # type: ignore[misc]
