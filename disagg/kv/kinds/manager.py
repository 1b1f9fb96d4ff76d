"""Block tables of one KV cache group: what all kinds share."""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from disagg.errors import InvariantViolation
from disagg.kv.blocks.block_pool import NULL_BLOCK, BlockPool
from disagg.kv.blocks.retention import Retention
from disagg.kv.kinds.setting import GroupSetting

Drop = Callable[[Hashable, list[int]], None]
"""Ends a sequence's holds: (key, block ids in eviction order)."""


@dataclass(slots=True)
class GroupTable:
    """One sequence's blocks in one group.

    Attributes:
        blocks: block id per block index; NULL_BLOCK where nothing is kept.
        held: number of entries that are not null.
        num_skipped: leading entries that are null for good.
        num_published: leading entries that were looked at for publication.
        boundaries: positions at which a linear state was known to be complete.
        in_prompt: whether two more full blocks were known behind the last state looked at.
        run: states alike in this that precede it, block end by block end.
    """

    blocks: list[int] = field(default_factory=list)
    held: int = 0
    num_skipped: int = 0
    num_published: int = 0
    boundaries: list[int] = field(default_factory=list)
    in_prompt: bool = True
    run: int = 0


class Pages(Protocol):
    """What every manager needs of its spec; equal ones are looked up jointly."""

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""

    def first_seen(self, position: int) -> int | None:
        """First position whose KV a query at ``position`` reads; None: a state."""


class GroupManager:
    """Tables grow at the end and lose what attention can no longer see.

    Kinds override ``next_drop``, ``match`` and, where tables have holes, more.

    Args:
        spec: of the group's layers.
        pool: the worker's pool.
        setting: the group's surroundings.
        peak_blocks: most blocks that one sequence holds at once.
    """

    hits_nest = False
    """Part of `match`: whether every shorter prefix of a hit is a hit of the same blocks."""
    hits_end_with_steps = False
    """Part of `publish`: whether a hit can end only where a step ended."""

    def __init__(
        self, spec: Pages, pool: BlockPool, setting: GroupSetting, peak_blocks: int
    ) -> None:
        self.group = setting.group
        self.spec = spec
        self.pool = pool
        self.blocks_per_state = setting.blocks_per_state
        self.block_tokens = spec.block_tokens
        self.hash_ratio = spec.block_tokens // setting.hash_block_tokens
        self.alignment_tokens = setting.alignment_tokens
        self.peak_blocks = peak_blocks
        self.proof_tokens = spec.block_tokens
        """Tokens beyond a hit that an EAGLE group of this kind looks at."""
        self.tables: dict[Hashable, GroupTable] = {}

    # -- what a kind defines ------------------------------------------------------------------

    def skipped_tokens(self, position: int) -> int:
        """Leading tokens that a query at position ``position`` does not see."""
        first = self.spec.first_seen(position)
        assert first is not None, "kinds with states override this"
        return first

    def next_drop(self, num_skipped: int) -> int | None:
        """Computed tokens from which on the block after ``num_skipped`` ones is not seen.

        None: blocks never leave a sequence of this kind.
        """
        raise NotImplementedError

    def returning(self, blocks: Iterable[int]) -> Iterable[int]:
        """Those of a sequence's blocks that it will give up as it goes on."""
        return filter(None, blocks)

    def num_settled(self, num_computed: int) -> int:
        """Leading table entries that are computed and stay in sight until the sequence ends."""
        return 0

    def match(
        self,
        groups: Sequence[int],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        drop_last: bool,
    ) -> tuple[list[int], ...]:
        """Longest prefix cached in all ``groups`` (they have this spec), one list each.

        Args:
            groups: the groups.
            hashes: chain values at this kind's block ends.
            max_tokens: bound of the prefix (before a block is dropped).
            alignment_tokens: the prefix is a multiple of it.
            drop_last: EAGLE: prove one block more than is returned.
        """
        raise NotImplementedError

    # -- counting -----------------------------------------------------------------------------

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens span."""
        return -(-num_tokens // self.block_tokens)

    def spanned_tokens(self, num_blocks: int) -> int:
        """Tokens that the first ``num_blocks`` table entries span."""
        return num_blocks // self.blocks_per_state * self.block_tokens

    def num_full_blocks(self, num_tokens: int) -> int:
        """Table entries of the blocks that ``num_tokens`` tokens fill."""
        return num_tokens // self.block_tokens * self.blocks_per_state

    def first_block(self, position: int) -> int:
        """Index of the first block that a query at position ``position`` sees."""
        return self.skipped_tokens(position) // self.block_tokens

    def kept_hits(self, hit: Sequence[int], position: int) -> list[int]:
        """The hit's blocks that a sequence with ``position`` tokens will still hold."""
        first = self.first_block(position)
        return without_null(hit[first:])

    def num_to_allocate(
        self,
        key: Hashable,
        num_tokens: int,
        hit: Sequence[int],
        num_known: int,
        capped: bool = False,
    ) -> int:
        """Free blocks that growing to ``num_tokens`` takes, without the hit's own.

        Args:
            key: the sequence.
            num_tokens: tokens that need a slot.
            hit: cached blocks to adopt, for a sequence without a table.
            num_known: tokens known before this step, hit and external ones included.
            capped: count a whole prompt, of which at most ``peak_blocks`` are held at once.
        """
        required = self.num_blocks(num_tokens)
        if capped:
            required = min(required, self.peak_blocks)
        table = self.tables.get(key)
        if table is not None:
            return max(required - len(table.blocks), 0)
        skipped = self.first_block(num_known)
        return max(required - max(skipped, len(hit)), 0)

    def num_promised(self, key: Hashable, num_tokens: int) -> int:
        """Further blocks a sequence with a table can need at once on its way to num_tokens."""
        table = self.tables[key]
        remaining = max(0, self.num_blocks(num_tokens) - len(table.blocks))
        return max(0, min(remaining, self.peak_blocks - table.held))

    # -- changing tables ----------------------------------------------------------------------

    def adopt(self, key: Hashable, hit: Sequence[int], position: int) -> None:
        """Start a table: hold the hit's blocks that stay visible, null before them."""
        first = self.first_block(position)
        blocks = [NULL_BLOCK] * first
        blocks += hit[first:]
        kept = self.kept_hits(hit, position)
        self.pool.touch(kept)
        self.tables[key] = GroupTable(
            blocks, len(kept), num_skipped=first, num_published=len(blocks)
        )

    def grow_external(self, key: Hashable, num_known: int) -> None:
        """Room for the external tokens up to ``num_known``."""
        self.grow(key, num_known)

    def grow(self, key: Hashable, num_tokens: int) -> None:
        """Room for ``num_tokens`` tokens; the caller has counted."""
        table = self.tables[key]
        missing = self.num_blocks(num_tokens) - len(table.blocks)
        if missing > 0:
            table.blocks += self.pool.allocate(missing)
            table.held += missing

    def drop_skipped(self, key: Hashable, position: int) -> None:
        """Give up the blocks that no query from ``position`` on sees, last one first."""
        table = self.tables[key]
        end = min(self.first_block(position), len(table.blocks))
        start = table.num_skipped
        if end <= start:
            return
        table.num_skipped = end
        if end == start + 1:  # as in decoding
            leaving = without_null([table.blocks[start]])
            table.blocks[start] = NULL_BLOCK
        else:
            leaving = without_null(table.blocks[start:end])
            leaving.reverse()
            table.blocks[start:end] = [NULL_BLOCK] * (end - start)
        table.held -= len(leaving)
        if leaving:
            self.pool.release(leaving)

    def forget_skipped(
        self, key: Hashable, position: int, kept: Iterable[int], retention: Retention
    ) -> None:
        """Take out of the cache what ``drop_skipped`` will give up and no kept position sees."""
        table = self.tables[key]
        start, end = table.num_skipped, min(self.first_block(position), len(table.blocks))
        if end <= start:
            return
        lost = table.blocks[start:end]
        first = self.spanned_tokens(start)
        for place in retention.positions(kept, first, position, self.alignment_tokens):
            seen = slice(
                max(self.first_block(place) - start, 0), max(self.num_blocks(place) - start, 0)
            )
            lost[seen] = [NULL_BLOCK] * len(lost[seen])
        self.pool.forget(without_null(lost))

    def free(self, key: Hashable, drop: Drop) -> None:
        """End a table, last block first."""
        table = self.tables.pop(key, None)
        if table is not None and table.held:
            blocks = table.blocks[: table.num_skipped - 1 if table.num_skipped else None : -1]
            drop(key, blocks if table.held == len(blocks) else without_null(blocks))

    def in_window_blocks(self, key: Hashable, num_tokens: int) -> list[tuple[int, int]]:
        """The (block index, block id) pairs that a query at position ``num_tokens`` reads."""
        first = self.first_block(num_tokens)
        seen = self.skipped_tokens(num_tokens) < num_tokens
        end = self.num_blocks(num_tokens) if seen else first
        pairs = enumerate(self.tables[key].blocks[first:end], first)
        return [pair for pair in pairs if pair[1] != NULL_BLOCK]

    def room_end(self, key: Hashable) -> int:
        """Tokens for which the table has room."""
        return self.spanned_tokens(len(self.tables[key].blocks))

    def check(self, keys: Set[Hashable]) -> None:
        """Verify that exactly these sequences have tables, with right counts."""
        if self.tables.keys() != keys:
            raise InvariantViolation(f"group {self.group} has tables of other sequences")
        for key, table in self.tables.items():
            if table.held != len(table.blocks) - table.blocks.count(NULL_BLOCK):
                raise InvariantViolation(f"{key!r}: held count of group {self.group}")

    # -- contents by chain value --------------------------------------------------------------

    def cached_blocks(self, value: bytes) -> list[int]:
        """The blocks that are cached under a chain value; none if one of them is lacking."""
        block = self.pool.cache.index(self.group).get(value)
        return [] if block is None else [block]

    def stored_values(self, value: bytes) -> list[bytes]:
        """What a store outside the pool calls the blocks of ``cached_blocks``, in their order."""
        return [value]

    # -- publishing ---------------------------------------------------------------------------

    def withhold(self, key: Hashable, num_blocks: int) -> None:
        """Never publish the first ``num_blocks`` entries: a part of one of them is not known."""
        table = self.tables[key]
        table.num_published = max(table.num_published, num_blocks)

    def chain(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Chain values at this group's block ends."""
        ratio = self.hash_ratio
        return hashes if ratio == 1 else hashes[ratio - 1 :: ratio]

    def publish(
        self,
        key: Hashable,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        num_computed: int,
        deduplicate: bool,
    ) -> None:
        """Publish the full blocks below ``num_computed`` that are still held.

        Blocks after the last aligned position wait: no hit could end there.
        """
        table = self.tables[key]
        num_computed -= num_computed % self.alignment_tokens
        end = min(
            num_computed // self.block_tokens, len(hashes) // self.hash_ratio, len(table.blocks)
        )
        if end <= table.num_published:
            return
        start = max(table.num_published, table.num_skipped)
        table.num_published = end
        self._publish_run(table, hashes, token_ids, start, end, deduplicate)

    def publish_around(
        self,
        key: Hashable,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        num_computed: int,
        failed: Collection[int],
    ) -> None:
        """Publish the runs of full blocks between those (by block index) that did not arrive."""
        table = self.tables[key]
        end = min(
            num_computed // self.block_tokens, len(hashes) // self.hash_ratio, len(table.blocks)
        )
        first = max(table.num_published, table.num_skipped)
        stops = [first - 1, *sorted(index for index in failed if first <= index < end), end]
        table.num_published = end
        for before, stop in pairwise(stops):
            self._publish_run(table, hashes, token_ids, before + 1, stop, True)

    def _publish_run(
        self,
        table: GroupTable,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        start: int,
        end: int,
        deduplicate: bool,
    ) -> None:
        if start >= end:
            return
        ratio, size = self.hash_ratio, self.block_tokens
        self.pool.publish(
            self.group,
            table.blocks[start:end],
            hashes[(start + 1) * ratio - 1 : end * ratio : ratio],
            parent_hash=hashes[start * ratio - 1] if start else None,
            first_position=start * size,
            block_tokens=size,
            token_ids=token_ids[start * size : end * size] if token_ids else (),
            deduplicate=deduplicate,
        )


def without_null(blocks: Sequence[int]) -> list[int]:
    """The blocks of a table that are not null blocks."""
    return list(filter(None, blocks))
