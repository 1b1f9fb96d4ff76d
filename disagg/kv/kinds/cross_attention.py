"""Cross-attention: K and V of the encoder's outputs, the same for every step of a request."""

import sys
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from disagg.errors import ConfigError
from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.kinds.attention import AttentionSpec, require_positive
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.manager import GroupManager
from disagg.kv.kinds.setting import GroupSetting
from disagg.messages.registration import GroupInfo


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec(AttentionSpec):
    """K and V of encoder outputs: every position sees all of them, none of the tokens.

    Attributes:
        encoder_tokens: encoder outputs of one request, the same for all.
    """

    kind: ClassVar[str] = "cross_attention"
    vllm_kind: ClassVar[str] = "cross_attention"

    encoder_tokens: int

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        require_positive(self, "encoder_tokens")

    @property
    def num_blocks(self) -> int:
        """Blocks that the encoder's outputs of one request need."""
        return -(-self.encoder_tokens // self.block_tokens)

    @property
    def window_tokens(self) -> int:
        """No window: 0."""
        return 0

    def first_seen(self, position: int) -> int:
        """Whatever the position: nothing ever leaves its sight."""
        return 0

    def attention_pages(self) -> None:
        """No such pages: the K and V here are not those of tokens."""

    def create_manager(self, pool: BlockPool, setting: GroupSetting) -> GroupManager:
        """A manager whose tables have a fixed length."""
        setting.refuse_eagle(type(self).__name__)
        return CrossAttentionManager(self, pool, setting, self.num_blocks)

    @staticmethod
    def check_group(group: GroupInfo) -> None:
        """No prefix of such a model is ever a hit."""
        raise ConfigError(f"a {group.kind} group cannot be routed by prefix", param="groups.kind")

    @staticmethod
    def first_needed(group: GroupInfo, num_blocks: int) -> int:
        """None: there is no boundary to go on from."""
        return num_blocks

    def visible_tokens(self, num_tokens: int) -> int:
        """The encoder's outputs, whatever the tokens."""
        return self.encoder_tokens

    def without_window(self) -> Spec:
        """The spec itself: it has no window."""
        return self


class CrossAttentionManager(GroupManager):
    """A table of fixed length: allocated with the first step, seen whole, freed at the end.

    The chain values name tokens, not what the encoder heard or saw, so nothing of such a model
    is ever a hit: this group has none, and all groups must agree. It publishes nothing.
    """

    hits_nest = True

    def __init__(
        self, spec: CrossAttentionSpec, pool: BlockPool, setting: GroupSetting, peak_blocks: int
    ) -> None:
        super().__init__(spec, pool, setting, peak_blocks)
        self._num_blocks = spec.num_blocks

    def num_blocks(self, num_tokens: int) -> int:
        """The length of a table, whatever ``num_tokens`` is."""
        return self._num_blocks

    def spanned_tokens(self, num_blocks: int) -> int:
        """Its blocks span none of the tokens that are counted elsewhere."""
        return 0

    def next_drop(self, num_skipped: int) -> None:
        """No block is ever dropped before the request ends."""

    def returning(self, blocks: Iterable[int]) -> Iterable[int]:
        """No block returns to the promise while the request lives."""
        return ()

    def room_end(self, key: Hashable) -> int:
        """A table has room for every length of its sequence."""
        return sys.maxsize

    def match(
        self,
        groups: Sequence[int],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        drop_last: bool,
    ) -> tuple[list[int], ...]:
        """No hit: chain values do not name the encoder's input."""
        return tuple([] for _ in groups)

    def in_window_blocks(self, key: Hashable, num_tokens: int) -> list[tuple[int, int]]:
        """All blocks of the table, whatever the position."""
        return list(enumerate(self.tables[key].blocks))

    def publish(
        self,
        key: Hashable,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        num_computed: int,
        deduplicate: bool,
    ) -> None:
        """Publish no block: nothing of this kind is shared."""

    def publish_around(
        self,
        key: Hashable,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        num_computed: int,
        failed: Collection[int],
    ) -> None:
        """Publish no block: nothing of this kind is shared."""
