"""Linear state (Mamba and relatives): the state after a position, not the tokens before it."""

from collections.abc import Hashable, Mapping, Sequence

from disagg.kv.block_pool import NULL_BLOCK
from disagg.kv.manager import Drop, GroupManager, GroupTable


class LinearStateManager(GroupManager):
    """A table holds the running state and, until the next step, the one it started from.

    A step that ends in a new block index writes there (the engine copies or reads the previous
    state); indices in between stay null. A block can be cached only if some step ended exactly
    at its end, or the state was pulled for that position.
    """

    def skipped_tokens(self, num_computed: int) -> int:
        """Only the state at ``num_computed`` matters."""
        return max(0, num_computed - 1)

    def match(
        self,
        indexes: Sequence[Mapping[bytes, int]],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        drop_last: bool,
    ) -> tuple[list[int], ...]:
        """The right-most aligned state that all groups have."""
        step = alignment_tokens // self.block_tokens
        end = min(max_tokens // self.block_tokens, len(hashes))
        end -= end % step
        first, *others = indexes
        for length in range(end, 0, -step):
            value = hashes[length - 1]
            if value in first and all(value in index for index in others):
                nulls = [NULL_BLOCK] * (length - 1)
                return tuple([*nulls, index[value]] for index in indexes)
        return tuple([] for _ in indexes)

    def num_to_allocate(
        self,
        key: Hashable,
        num_tokens: int,
        hit: Sequence[int],
        num_computed: int,
        capped: bool = False,
    ) -> int:
        """One block per step that reaches a new index, one more for an external state."""
        table = self.tables.get(key)
        if table is not None:
            return int(self.num_blocks(num_tokens) > len(table.blocks))
        external = int(self.num_blocks(num_computed) > len(hit))
        return external + int(self.num_blocks(num_tokens) > self.num_blocks(num_computed))

    def grow_external(self, key: Hashable, num_computed: int) -> None:
        """A block for the external state at ``num_computed``."""
        self.grow(key, num_computed)
        self.tables[key].boundaries.append(num_computed)

    def grow(self, key: Hashable, num_tokens: int) -> None:
        """A block for the state at ``num_tokens``, null before it."""
        table = self.tables[key]
        missing = self.num_blocks(num_tokens) - len(table.blocks)
        if missing > 0:
            table.blocks += [NULL_BLOCK] * (missing - 1)
            table.blocks += self.pool.allocate(1)
            table.held += 1

    def drop_skipped(self, key: Hashable, num_computed: int, drop: Drop) -> None:
        """Give up all states before the running one."""
        table = self.tables[key]
        end = min(self.skipped_tokens(num_computed) // self.block_tokens, len(table.blocks) - 1)
        start, table.num_skipped = table.num_skipped, max(table.num_skipped, end)
        leaving = [block for block in table.blocks[start:end] if block != NULL_BLOCK]
        if leaving:
            table.blocks[start:end] = [NULL_BLOCK] * (end - start)
            table.held -= len(leaving)
            leaving.reverse()
            drop(key, self.group, leaving)

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

    def _publish_state(
        self,
        table: GroupTable,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        end: int,
        deduplicate: bool,
    ) -> None:
        place = end // self.block_tokens
        known = min(len(hashes) // self.hash_ratio, len(table.blocks))
        if end % self.alignment_tokens or not table.num_published < place <= known:
            return
        table.num_published = place
        if table.blocks[place - 1] != NULL_BLOCK:
            self._publish_range(table, hashes, token_ids, place - 1, place, deduplicate)
