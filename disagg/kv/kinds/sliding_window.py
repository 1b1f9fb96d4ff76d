"""Sliding window: only the last ``window_tokens - 1`` tokens before a query matter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from disagg.errors import ConfigError
from disagg.kv.blocks.block_pool import NULL_BLOCK, BlockPool
from disagg.kv.kinds.attention import AttentionSpec, require_positive
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import AttentionPages, Spec
from disagg.kv.kinds.manager import GroupManager, GroupTable
from disagg.kv.kinds.setting import GroupSetting
from disagg.messages.registration import GroupInfo

_PROBES = 16
"""Blocks of a candidate that are probed one by one before all of them are."""


def num_window_blocks(window_tokens: int, block_tokens: int) -> int:
    """Blocks before a boundary that the query at that boundary sees something of."""
    return -(-(window_tokens - 1) // block_tokens)


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(AttentionSpec):
    """Position p sees positions ``p - window_tokens + 1 .. p``."""

    kind: ClassVar[str] = "sliding_window"
    vllm_kind: ClassVar[str] = "sliding_window"

    window_tokens: int

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        require_positive(self, "window_tokens")

    def first_seen(self, position: int) -> int:
        """First position of the window that ends at ``position``."""
        return max(0, position - self.window_tokens + 1)

    def attention_pages(self) -> AttentionPages:
        """The pages of K and V, with this window."""
        return AttentionPages(
            self.num_kv_heads,
            self.block_tokens,
            self.head_size,
            self.dtype_bytes,
            self.window_tokens,
        )

    def create_manager(self, pool: BlockPool, setting: GroupSetting) -> GroupManager:
        """A manager whose tables start with null blocks."""
        tokens = self.window_tokens - 1 + setting.max_step_tokens
        # One more block than the tokens fill: the window may start inside a block.
        peak = setting.num_blocks(tokens, self.block_tokens) + 1
        return SlidingWindowManager(self, pool, setting, peak)

    @staticmethod
    def check_group(group: GroupInfo) -> None:
        """Refuse a window of no tokens."""
        if group.window_tokens < 1:
            raise ConfigError(f"a {group.kind} group needs a window", param="groups.window_tokens")

    @staticmethod
    def first_needed(group: GroupInfo, num_blocks: int) -> int:
        """The blocks of the window before the boundary."""
        return max(0, num_blocks - num_window_blocks(group.window_tokens, group.block_tokens))

    def event_fields(self) -> dict[str, object]:
        """The window's length, besides the fields of all kinds."""
        return {"kv_cache_spec_sliding_window": self.window_tokens}

    def visible_tokens(self, num_tokens: int) -> int:
        """One layer keeps at most one window of tokens."""
        return min(self.window_tokens, num_tokens)

    def without_window(self) -> Spec:
        """Full attention with the same heads."""
        return FullAttentionSpec(
            self.block_tokens, self.num_kv_heads, self.head_size, self.dtype_bytes
        )


class SlidingWindowManager(GroupManager):
    """Tables that start with nulls; position p sees ``p - window_tokens + 1 .. p``."""

    def __init__(
        self, spec: SlidingWindowSpec, pool: BlockPool, setting: GroupSetting, peak_blocks: int
    ) -> None:
        super().__init__(spec, pool, setting, peak_blocks)
        self.window_tokens = spec.window_tokens
        self.num_window_blocks = num_window_blocks(spec.window_tokens, spec.block_tokens)
        self._num_proof_blocks = int(setting.drops_last)

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
        indexes = [self.pool.cache.index(group) for group in groups]
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

    def _publish_run(
        self,
        table: GroupTable,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        start: int,
        end: int,
        deduplicate: bool,
    ) -> None:
        """Publish what the window of some aligned boundary covers.

        Where other groups have larger blocks, the rest can be in no hit; cached, it would displace
        blocks that can (as in vLLM).
        """
        per_alignment = self.alignment_tokens // self.block_tokens
        before, after = self.num_window_blocks, self._num_proof_blocks
        if before + after >= per_alignment:
            super()._publish_run(table, hashes, token_ids, start, end, deduplicate)
            return
        first = max(start // per_alignment, 1) * per_alignment
        for boundary in range(first, end + per_alignment, per_alignment):
            begin, stop = max(start, boundary - before), min(end, boundary + after)
            super()._publish_run(table, hashes, token_ids, begin, stop, deduplicate)
