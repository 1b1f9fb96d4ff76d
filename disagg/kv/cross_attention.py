"""Cross-attention: K and V of the encoder's outputs, the same for every step of a request."""

import sys
from collections.abc import Hashable, Sequence

from disagg.kv.block_pool import BlockPool
from disagg.kv.manager import GroupLimits, GroupManager
from disagg.kv.specs import CrossAttentionSpec


class CrossAttentionManager(GroupManager):
    """A table of fixed length: allocated with the first step, seen whole, freed at the end.

    The chain values name tokens, not what the encoder heard or saw, so nothing of such a model
    is ever a hit: this group has none, and all groups must agree. It publishes nothing.
    """

    returns_blocks = False

    def __init__(
        self, group: int, spec: CrossAttentionSpec, pool: BlockPool, limits: GroupLimits
    ) -> None:
        super().__init__(group, spec, pool, limits)
        self._num_blocks = spec.num_blocks

    def num_blocks(self, num_tokens: int) -> int:
        """The same for every length."""
        return self._num_blocks

    def spanned_tokens(self, num_blocks: int) -> int:
        """Its blocks span none of the tokens that are counted elsewhere."""
        return 0

    def skipped_tokens(self, num_computed: int) -> int:
        """Nothing is ever out of sight."""
        return 0

    def next_drop(self, num_skipped: int) -> int:
        """Never: no sequence is that long."""
        return sys.maxsize

    def room_end(self, key: Hashable) -> int:
        """No sequence outgrows it."""
        return sys.maxsize

    def match(
        self,
        groups: Sequence[int],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        drop_last: bool,
    ) -> tuple[list[int], ...]:
        """Nothing."""
        return tuple([] for _ in groups)

    def in_window_blocks(self, key: Hashable, num_tokens: int) -> list[tuple[int, int]]:
        """All of them, whatever the position."""
        return list(enumerate(self.tables[key].blocks))

    def publish(
        self,
        key: Hashable,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        num_computed: int,
        deduplicate: bool,
    ) -> None:
        """Nothing."""
