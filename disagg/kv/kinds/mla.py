"""Multi-head latent attention: full attention over one latent vector per token."""

from dataclasses import dataclass
from typing import ClassVar

from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.kinds.attention import AttentionSpec
from disagg.kv.kinds.full_attention import FullAttentionManager
from disagg.kv.kinds.kind import AttentionPages, Spec
from disagg.kv.kinds.manager import GroupManager
from disagg.kv.kinds.setting import GroupSetting
from disagg.messages.registration import GroupInfo


@dataclass(frozen=True, slots=True)
class MLASpec(AttentionSpec):
    """Every position sees the latents of all positions before it."""

    kind: ClassVar[str] = "mla"
    vllm_kind: ClassVar[str] = "mla_attention"

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's latents in one block; there is no separate V."""
        return self.num_kv_heads * self.block_tokens * self.head_size * self.dtype_bytes

    @property
    def window_tokens(self) -> int:
        """No window: 0."""
        return 0

    def first_seen(self, position: int) -> int:
        """Position 0, whatever ``position`` is."""
        return 0

    def attention_pages(self) -> AttentionPages:
        """The pages of latents, without V."""
        return AttentionPages(
            self.num_kv_heads,
            self.block_tokens,
            self.head_size,
            self.dtype_bytes,
            has_values=False,
        )

    def create_manager(self, pool: BlockPool, setting: GroupSetting) -> GroupManager:
        """A manager as for full attention."""
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
