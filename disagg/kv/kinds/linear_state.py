"""Linear state (Mamba and relatives): the state after a position, not the tokens before it."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from disagg.kv.blocks.block_pool import NULL_BLOCK, BlockPool
from disagg.kv.kinds.attention import require_positive
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.manager import Drop, GroupManager, GroupTable
from disagg.kv.kinds.setting import GroupSetting
from disagg.messages.registration import GroupInfo


@dataclass(frozen=True, slots=True)
class LinearStateSpec:
    """A recurrent state of fixed size; a block is the state after its last token.

    Attributes:
        block_tokens: distance of the positions at which states can be kept.
        state_bytes: bytes of one layer's state (all its tensors).
    """

    kind: ClassVar[str] = "linear_state"
    vllm_kind: ClassVar[str] = "mamba"

    block_tokens: int
    state_bytes: int

    def __post_init__(self) -> None:
        require_positive(self, "block_tokens", "state_bytes")

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's state."""
        return self.state_bytes

    @property
    def window_tokens(self) -> int:
        """No window: 0."""
        return 0

    def first_seen(self, position: int) -> None:
        """No position: a query reads a state instead."""

    def attention_pages(self) -> None:
        """No such pages: a state has no K and V."""

    def create_manager(self, pool: BlockPool, setting: GroupSetting) -> GroupManager:
        """Tables of the running state and those that steps in flight started from."""
        setting.refuse_lookahead(type(self).__name__)
        # The state that the oldest step in flight started from, and the end of each.
        peak = (1 + setting.steps_max) * setting.blocks_per_state
        return LinearStateManager(self, pool, setting, peak)

    @staticmethod
    def check_group(group: GroupInfo) -> None:
        """Refuse nothing besides what is refused of all kinds."""

    @staticmethod
    def first_needed(group: GroupInfo, num_blocks: int) -> int:
        """The state at the boundary."""
        return max(0, num_blocks - 1)

    def event_fields(self) -> dict[str, object]:
        """No field besides those of all kinds."""
        return {}

    def visible_tokens(self, num_tokens: int) -> int:
        """A state keeps no tokens: 0."""
        return 0

    def split_layers(self, num_layers: int, block_bytes: int) -> tuple[int, int]:
        """One group, whose state is a list of blocks: blocks need not grow to its size."""
        return 1, -(-num_layers * self.page_bytes // block_bytes)

    def check_blocks_per_state(self, num_blocks: int) -> None:
        """Refuse nothing: a state may take any number of blocks."""

    def rank_block_bytes(self, num_layers: int, blocks_per_state: int, tensor_parallel: int) -> int:
        """States are split as far as the block is."""
        useful_bytes = -(-num_layers * self.page_bytes // blocks_per_state)
        return -(-useful_bytes // tensor_parallel)

    def token_and_state_bytes(self, taken_bytes: int) -> tuple[int, int]:
        """All bytes belong to the state, none to tokens."""
        return 0, taken_bytes

    def without_window(self) -> Spec:
        """The spec itself: it has no window."""
        return self


class LinearStateManager(GroupManager):
    """A table holds the running state and, until the next step, the one it started from.

    A state is a list of ``blocks_per_state`` blocks, adjacent in the table: they are allocated,
    dropped, held and pulled together, and found together or not at all. The first one carries
    the chain value; the others are cached under that value and the first one's id, in an index
    of their own, so states computed twice are never mixed.

    A step that ends in a new state's range writes there (the engine copies or reads the previous
    state); states in between stay null. A state can be cached only if some step ended exactly
    at its end, or it was pulled for that position.

    As an EAGLE group it drops nothing (as in the peer): draft layers have no such states.
    """

    hits_end_with_steps = True

    def __init__(
        self, spec: LinearStateSpec, pool: BlockPool, setting: GroupSetting, peak_blocks: int
    ) -> None:
        super().__init__(spec, pool, setting, peak_blocks)
        self.proof_tokens = 0
        self._followers_index = pool.num_groups - 1

    def num_blocks(self, num_tokens: int) -> int:
        """Table entries up to the state at ``num_tokens``."""
        return super().num_blocks(num_tokens) * self.blocks_per_state

    def first_block(self, position: int) -> int:
        """Table index of the first block of the state at ``position``."""
        return super().first_block(position) * self.blocks_per_state

    def skipped_tokens(self, position: int) -> int:
        """Only the state at ``position`` matters."""
        return max(0, position - 1)

    def next_drop(self, num_skipped: int) -> int:
        """When the state after it is the one that matters."""
        return (num_skipped // self.blocks_per_state + 1) * self.block_tokens + 1

    def match(
        self,
        groups: Sequence[int],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        drop_last: bool,
    ) -> tuple[list[int], ...]:
        """The right-most aligned state that all groups have."""
        indexes = [self.pool.cache.index(group) for group in groups]
        step = alignment_tokens // self.block_tokens
        end = min(max_tokens // self.block_tokens, len(hashes))
        end -= end % step
        for length in range(end, 0, -step):
            value = hashes[length - 1]
            if value not in indexes[0]:
                continue
            states = [self._find(index, value) for index in indexes]
            if all(states):
                nulls = [NULL_BLOCK] * ((length - 1) * self.blocks_per_state)
                return tuple([*nulls, *state] for state in states)
        return tuple([] for _ in indexes)

    def cached_blocks(self, value: bytes) -> list[int]:
        """All blocks of the state that is cached under a chain value, or none."""
        return self._find(self.pool.cache.index(self.group), value)

    def stored_values(self, value: bytes) -> list[bytes]:
        """The value for the first block of a state; with a number behind it for the others."""
        others = range(1, self.blocks_per_state)
        return [value, *(value + part.to_bytes(4, "big") for part in others)]

    def _find(self, index: Mapping[bytes, int], value: bytes) -> list[int]:
        """All blocks of a cached state, or none."""
        first = index.get(value)
        if first is None:
            return []
        followers = self.pool.cache.index(self._followers_index)
        found = [followers.get(key) for key in self._follower_keys(value, first)]
        return [] if None in found else [first, *filter(None, found)]

    def _follower_keys(self, value: bytes, first: int) -> list[bytes]:
        head = value + first.to_bytes(8, "big")
        return [head + part.to_bytes(4, "big") for part in range(1, self.blocks_per_state)]

    def num_to_allocate(
        self,
        key: Hashable,
        num_tokens: int,
        hit: Sequence[int],
        num_known: int,
        capped: bool = False,
    ) -> int:
        """One state per step that reaches a new range, one more for an external state."""
        table = self.tables.get(key)
        if table is not None:
            return self.blocks_per_state * int(self.num_blocks(num_tokens) > len(table.blocks))
        external = int(self.num_blocks(num_known) > len(hit))
        new = int(self.num_blocks(num_tokens) > self.num_blocks(num_known))
        return self.blocks_per_state * (external + new)

    def grow_external(self, key: Hashable, num_known: int) -> None:
        """Blocks for the external state at ``num_known``."""
        self.grow(key, num_known)
        self.tables[key].boundaries.append(num_known)

    def grow(self, key: Hashable, num_tokens: int) -> None:
        """Blocks for the state at ``num_tokens``, null before it."""
        table = self.tables[key]
        missing = self.num_blocks(num_tokens) - len(table.blocks)
        if missing > 0:
            table.blocks += [NULL_BLOCK] * (missing - self.blocks_per_state)
            table.blocks += self.pool.allocate(self.blocks_per_state)
            table.held += self.blocks_per_state

    def drop_skipped(self, key: Hashable, position: int) -> None:
        """Give up all states before the running one."""
        table = self.tables[key]
        end = min(self.first_block(position), len(table.blocks) - self.blocks_per_state)
        start, table.num_skipped = table.num_skipped, max(table.num_skipped, end)
        leaving = self._last_state_first(table.blocks[start:end])
        if leaving:
            table.blocks[start:end] = [NULL_BLOCK] * (end - start)
            table.held -= len(leaving)
            self.pool.release(leaving)

    def free(self, key: Hashable, drop: Drop) -> None:
        """End a table, last state first."""
        table = self.tables.pop(key, None)
        if table is not None and table.held:
            drop(key, self._last_state_first(table.blocks))

    def _last_state_first(self, blocks: Sequence[int]) -> list[int]:
        """Eviction order: a state's first block goes first, which ends the state as a whole."""
        size = self.blocks_per_state
        starts = range(len(blocks) - size, -1, -size)
        return [b for at in starts for b in blocks[at : at + size] if b != NULL_BLOCK]

    def publish(
        self,
        key: Hashable,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        num_computed: int,
        deduplicate: bool,
    ) -> None:
        """Publish the states that are complete at a block end."""
        table = self.tables[key]
        ready = sorted({end for end in (*table.boundaries, num_computed) if end <= num_computed})
        table.boundaries = [end for end in table.boundaries if end > num_computed]
        for end in ready:
            self._publish_state(table, hashes, token_ids, end, deduplicate)

    def _is_kept(self, run: int, num_tokens: int) -> bool:
        """Whether a state is cached that ``run`` others precede, block end by block end.

        As decoding passes them, one in ``blocks_per_state`` is, and the first two: so states take
        no more room than the pages of the tokens between them, and displace no prompt's. At a
        prompt's last two block ends the count begins anew: a longer prompt goes on from there.
        """
        return run < 2 or num_tokens // self.block_tokens % self.blocks_per_state == 0

    def publish_around(
        self,
        key: Hashable,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        num_computed: int,
        failed: Collection[int],
    ) -> None:
        """Publish no block: a state of which a block did not arrive is useless."""

    def _publish_state(
        self,
        table: GroupTable,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        num_tokens: int,
        deduplicate: bool,
    ) -> None:
        end = num_tokens // self.block_tokens * self.blocks_per_state
        known = len(hashes) // self.hash_ratio * self.blocks_per_state
        if num_tokens % self.alignment_tokens or not (
            table.num_published < end <= min(known, len(table.blocks))
        ):
            return
        in_prompt, before = end + self.blocks_per_state < known, table.num_published
        follows = 0 < before == end - self.blocks_per_state and in_prompt == table.in_prompt
        table.num_published, table.in_prompt = end, in_prompt
        table.run = table.run + 1 if follows else 0
        if not self._is_kept(table.run, num_tokens):
            return
        first, *others = table.blocks[end - self.blocks_per_state : end]
        if first == NULL_BLOCK:
            return
        value = hashes[num_tokens // self.block_tokens * self.hash_ratio - 1]
        keys = self._follower_keys(value, first)
        if not self.pool.cache.index(self._followers_index).keys().isdisjoint(keys):
            return  # left over from an earlier state in the same first block: stays private
        start = num_tokens - self.block_tokens
        self.pool.publish(
            self.group,
            [first],
            [value],
            parent_hash=hashes[start // self.block_tokens * self.hash_ratio - 1] if start else None,
            first_position=start,
            block_tokens=self.block_tokens,
            token_ids=token_ids[start:num_tokens],
            deduplicate=deduplicate,
        )
        if others and self.pool.cache.has(first):
            self.pool.publish(
                self._followers_index,
                others,
                keys,
                parent_hash=None,
                first_position=start,
                block_tokens=self.block_tokens,
            )
