"""A kind of KV group that the project does not have, in one file; `test_kinds` adds it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from disagg.errors import ConfigError
from disagg.kv.blocks.block_pool import NULL_BLOCK, BlockPool
from disagg.kv.kinds.attention import AttentionSpec, require_positive
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.manager import GroupManager
from disagg.kv.kinds.setting import GroupSetting
from disagg.messages.registration import GroupInfo


def first_seen(position: int, chunk_tokens: int) -> int:
    return max(0, position // chunk_tokens - 1) * chunk_tokens


@dataclass(frozen=True, slots=True)
class LookBackSpec(AttentionSpec):
    """Position p sees the positions of its own chunk and of the chunk before it (as in LongT5)."""

    kind: ClassVar[str] = "look_back"
    vllm_kind: ClassVar[str] = "look_back_attention"

    chunk_tokens: int

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        require_positive(self, "chunk_tokens")

    @property
    def window_tokens(self) -> int:
        return self.chunk_tokens

    def first_seen(self, position: int) -> int:
        return first_seen(position, self.chunk_tokens)

    def attention_pages(self) -> None:
        return None

    def create_manager(self, pool: BlockPool, setting: GroupSetting) -> GroupManager:
        setting.refuse_eagle(type(self).__name__)
        tokens = 2 * self.chunk_tokens + setting.max_step_tokens
        return LookBackManager(self, pool, setting, setting.num_blocks(tokens, self.block_tokens))

    @staticmethod
    def check_group(group: GroupInfo) -> None:
        if group.window_tokens < 1 or group.window_tokens % group.block_tokens:
            raise ConfigError("a look_back group needs whole blocks", param="groups.window_tokens")

    @staticmethod
    def first_needed(group: GroupInfo, num_blocks: int) -> int:
        """Its own chunk and the one before it, from the start of that."""
        end = num_blocks * group.block_tokens
        begun = -(-end // group.window_tokens) - 1  # the chunk of the last token
        return max(0, begun) * group.window_tokens // group.block_tokens

    def event_fields(self) -> dict[str, object]:
        return {"kv_cache_spec_look_back": self.chunk_tokens}

    def visible_tokens(self, num_tokens: int) -> int:
        return min(2 * self.chunk_tokens, num_tokens)

    def without_window(self) -> Spec:
        return FullAttentionSpec(
            self.block_tokens, self.num_kv_heads, self.head_size, self.dtype_bytes
        )


class LookBackManager(GroupManager):
    def __init__(
        self, spec: LookBackSpec, pool: BlockPool, setting: GroupSetting, peak_blocks: int
    ) -> None:
        super().__init__(spec, pool, setting, peak_blocks)
        self.chunk_tokens = spec.chunk_tokens

    def next_drop(self, num_skipped: int) -> int:
        size = self.chunk_tokens
        return (num_skipped * self.block_tokens // size + 2) * size

    def match(
        self,
        groups: Sequence[int],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        drop_last: bool,
    ) -> tuple[list[int], ...]:
        end = min(max_tokens, len(hashes) * self.block_tokens)
        for length in range(end - end % alignment_tokens, 0, -alignment_tokens):
            first = self.first_block(length)
            values = hashes[first : length // self.block_tokens]
            runs = [self.pool.cache.leading_run(group, values, len(values)) for group in groups]
            if all(len(run) == len(values) for run in runs):
                return tuple([NULL_BLOCK] * first + run for run in runs)
        return tuple([] for _ in groups)
