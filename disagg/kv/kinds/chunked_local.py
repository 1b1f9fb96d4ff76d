"""Chunked-local attention: a position sees its own chunk only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from disagg.errors import ConfigError
from disagg.kv.blocks.block_pool import NULL_BLOCK, BlockPool
from disagg.kv.kinds.attention import AttentionSpec, require_positive
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import AttentionPages, Spec
from disagg.kv.kinds.manager import GroupManager
from disagg.kv.kinds.setting import GroupSetting
from disagg.messages.registration import GroupInfo


def chunk_start(position: int, chunk_tokens: int) -> int:
    """First position of the chunk that ``position`` stands in."""
    return position // chunk_tokens * chunk_tokens


@dataclass(frozen=True, slots=True)
class ChunkedLocalSpec(AttentionSpec):
    """Position p sees the positions of its own chunk up to itself."""

    kind: ClassVar[str] = "chunked_local"
    vllm_kind: ClassVar[str] = "chunked_local_attention"

    chunk_tokens: int

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        require_positive(self, "chunk_tokens")

    @property
    def window_tokens(self) -> int:
        """Length of the chunk."""
        return self.chunk_tokens

    def first_seen(self, position: int) -> int:
        """First position of the chunk that ``position`` stands in."""
        return chunk_start(position, self.chunk_tokens)

    def attention_pages(self) -> AttentionPages:
        """The pages of K and V; a chunk is not a sliding window."""
        return AttentionPages(
            self.num_kv_heads, self.block_tokens, self.head_size, self.dtype_bytes
        )

    def create_manager(self, pool: BlockPool, setting: GroupSetting) -> GroupManager:
        """Tables that start with nulls up to the current chunk."""
        setting.refuse_eagle(type(self).__name__)
        # A chunk that is no multiple of the block starts inside one.
        spare = int(self.chunk_tokens % self.block_tokens > 0)
        tokens = self.chunk_tokens + setting.max_step_tokens
        peak = setting.num_blocks(tokens, self.block_tokens) + spare
        return ChunkedLocalManager(self, pool, setting, peak)

    @staticmethod
    def check_group(group: GroupInfo) -> None:
        """Refuse a chunk of no tokens."""
        if group.window_tokens < 1:
            raise ConfigError(f"a {group.kind} group needs a window", param="groups.window_tokens")

    @staticmethod
    def first_needed(group: GroupInfo, num_blocks: int) -> int:
        """The block in which the next token's chunk begins."""
        end = num_blocks * group.block_tokens
        return chunk_start(end, group.window_tokens) // group.block_tokens

    def visible_tokens(self, num_tokens: int) -> int:
        """One layer keeps at most one chunk of tokens."""
        return min(self.chunk_tokens, num_tokens)

    def without_window(self) -> Spec:
        """Full attention with the same heads."""
        return FullAttentionSpec(
            self.block_tokens, self.num_kv_heads, self.head_size, self.dtype_bytes
        )


class ChunkedLocalManager(GroupManager):
    """Tables that start with nulls up to the current chunk."""

    def __init__(
        self, spec: ChunkedLocalSpec, pool: BlockPool, setting: GroupSetting, peak_blocks: int
    ) -> None:
        super().__init__(spec, pool, setting, peak_blocks)
        self.chunk_tokens = spec.chunk_tokens

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
