"""Full attention: everything stays visible, hits are downward-closed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.kinds.attention import AttentionSpec
from disagg.kv.kinds.kind import AttentionPages, Spec
from disagg.kv.kinds.manager import GroupManager
from disagg.kv.kinds.setting import GroupSetting
from disagg.messages.registration import GroupInfo


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    """Every position sees all positions before it."""

    kind: ClassVar[str] = "full_attention"
    vllm_kind: ClassVar[str] = "full_attention"

    @property
    def window_tokens(self) -> int:
        """No window: 0."""
        return 0

    def first_seen(self, position: int) -> int:
        """Position 0, whatever ``position`` is."""
        return 0

    def attention_pages(self) -> AttentionPages:
        """The pages of K and V, without a window."""
        return AttentionPages(
            self.num_kv_heads, self.block_tokens, self.head_size, self.dtype_bytes
        )

    def create_manager(self, pool: BlockPool, setting: GroupSetting) -> GroupManager:
        """Tables without nulls, as long as the sequence."""
        peak = setting.num_blocks(setting.max_model_tokens, self.block_tokens)
        return FullAttentionManager(self, pool, setting, peak)

    @staticmethod
    def check_group(group: GroupInfo) -> None:
        """Refuse nothing besides what is refused of all kinds."""

    @staticmethod
    def first_needed(group: GroupInfo, num_blocks: int) -> int:
        """Everything before the boundary."""
        return 0

    def without_window(self) -> Spec:
        """The spec itself: it has no window."""
        return self


class FullAttentionManager(GroupManager):
    """Tables without null blocks: no block is ever out of sight."""

    hits_nest = True

    def next_drop(self, num_skipped: int) -> None:
        """No block is ever dropped before the sequence ends."""

    def returning(self, blocks: Iterable[int]) -> Iterable[int]:
        """No block returns to the promise while the sequence lives."""
        return ()

    def num_settled(self, num_computed: int) -> int:
        """Number of full blocks: each of them is settled."""
        return self.num_full_blocks(num_computed)

    def kept_hits(self, hit: Sequence[int], position: int) -> list[int]:
        """Every block of the hit is kept."""
        return list(hit)

    def match(
        self,
        groups: Sequence[int],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        drop_last: bool,
    ) -> tuple[list[int], ...]:
        """Longest run of cached blocks from the left."""
        end = min(max_tokens // self.block_tokens, len(hashes))
        found: list[list[int]] = []
        for group in groups:
            found.append(self.pool.cache.leading_run(group, hashes, end))
            end = len(found[-1])
        end = max(0, end - drop_last)
        end -= end % (alignment_tokens // self.block_tokens)
        return tuple(run if len(run) == end else run[:end] for run in found)
