"""What each kind of KV cache group defines: the protocol that every file beside this fulfils."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.kinds.manager import GroupManager
from disagg.kv.kinds.setting import GroupSetting
from disagg.messages.registration import GroupInfo


@dataclass(frozen=True, slots=True)
class AttentionPages:
    """Pages of K, then V, ``[num_kv_heads, block_tokens, head_size]`` each, or of latents alone.

    Attributes:
        num_kv_heads: heads of K and of V; 1 for latents.
        block_tokens: tokens per block.
        head_size: elements per head, or per latent.
        dtype_bytes: bytes per element.
        sliding_window: what the model's attention layers call by this name; None: nothing, also
            where something else bounds what a position sees (``first_seen``).
        has_values: False where latents take the place of K and V.
    """

    num_kv_heads: int
    block_tokens: int
    head_size: int
    dtype_bytes: int
    sliding_window: int | None = None
    has_values: bool = True


class Spec(Protocol):
    """What one layer keeps per token or per request.

    A frozen dataclass: hashable, and equal specs share block tables.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: ClassVar[str]
    """Our name: registrations, reports, the router."""
    vllm_kind: ClassVar[str]
    """The name in vLLM's KV events (``KVCacheSpecKind`` of 0.33.0)."""

    @property
    def block_tokens(self) -> int:
        """Tokens per block; of a state, the distance of the positions at which it can be kept."""

    @property
    def page_bytes(self) -> int:
        """Useful bytes of one layer in one block, or of one layer's state."""

    # -- what a position sees -----------------------------------------------------------------

    @property
    def window_tokens(self) -> int:
        """Window or chunk as it is registered; 0 where the kind has none."""

    def first_seen(self, position: int) -> int | None:
        """First position whose KV a query at ``position`` reads; None: it reads a state instead."""

    def attention_pages(self) -> AttentionPages | None:
        """The pages that attention reads; None: this kind keeps something else."""

    # -- block tables and match ---------------------------------------------------------------

    def create_manager(self, pool: BlockPool, setting: GroupSetting) -> GroupManager:
        """Tables of one group of this kind; raises ConfigError where the setting rules it out."""

    # -- the router's rule --------------------------------------------------------------------

    @staticmethod
    def check_group(group: GroupInfo) -> None:
        """Refuse what a router could not match exactly; raises ConfigError naming the field."""

    @staticmethod
    def first_needed(group: GroupInfo, num_blocks: int) -> int:
        """Of the first ``num_blocks`` blocks, the first that a query right after them needs.

        It needs those after that one as well; ``num_blocks``: none. Never goes down as
        ``num_blocks`` goes up.
        """

    # -- events -------------------------------------------------------------------------------

    def event_fields(self) -> dict[str, object]:
        """What vLLM's stored events carry besides, for this kind."""

    # -- memory -------------------------------------------------------------------------------

    def visible_tokens(self, num_tokens: int) -> int:
        """Tokens that one layer keeps of a request of ``num_tokens``; 0 for a state."""

    def split_layers(self, num_layers: int, block_bytes: int) -> tuple[int, int]:
        """How layers share blocks: the groups that they form, the blocks of one of their states."""

    def check_blocks_per_state(self, num_blocks: int) -> None:
        """Refuse, by ConfigError, a group whose states would take so many blocks."""

    def rank_block_bytes(self, num_layers: int, blocks_per_state: int, tensor_parallel: int) -> int:
        """Useful bytes of a group's block on one of the ranks that share the heads."""

    def token_and_state_bytes(self, taken_bytes: int) -> tuple[int, int]:
        """Of what a block or a state takes: bytes per kept token, bytes per state."""

    def without_window(self) -> "Spec":
        """What an engine without hybrid groups would keep for this layer."""


def keeps_states(spec: Spec) -> bool:
    """Whether a layer keeps one state per request, instead of something per token."""
    return spec.first_seen(0) is None
