"""Block tables on their way to the engine: each step carries what changed since the last one.

A table grows at its end and loses leading entries when they leave the window; no other entry of
it ever changes. So two numbers per table are what the engine has of it. The engine sees the steps
in the order of their launch and makes the changes of each one before it computes it, also of one
that then fails: after that its tables equal those the coordinator had at the launch.
"""

from array import array
from collections.abc import Iterable, Mapping

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.messages.identity import RequestKey
from disagg.scheduling.step import SequenceSlice, Step, TableChange

Tables = Mapping[RequestKey, tuple["array[int]", ...]]
"""Of each sequence the block table of each group."""


class SentTables:
    """One sequence's block tables as far as steps have carried them.

    Valid from the sequence's first step until it gives its blocks up. Two steps in flight need no
    more than one: a change is sent with the step that is launched after it.
    """

    def __init__(self, kv: KVCacheCoordinator, key: RequestKey) -> None:
        self._tables = [manager.tables[key] for manager in kv.managers]
        self._sent = [(0, 0) for _ in self._tables]

    def take_changes(self) -> tuple[TableChange, ...]:
        """What the next step must carry: one change per group, or nothing at all."""
        now = [(table.num_skipped, len(table.blocks)) for table in self._tables]
        if now == self._sent:
            return ()
        before, self._sent = self._sent, now
        return tuple(
            TableChange(
                table.num_skipped, tuple(table.blocks[num_sent:] if num_sent else table.blocks)
            )
            for table, (_, num_sent) in zip(self._tables, before, strict=True)
        )


class BlockTables:
    """What an engine keeps: the block tables of all sequences it has computed and not ended.

    Args:
        num_groups: KV cache groups.
        num_blocks: block ids are below it.
    """

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self._num_groups = num_groups
        self._num_blocks = num_blocks
        self._tables: dict[RequestKey, tuple[array[int], ...]] = {}
        self._num_skipped: dict[RequestKey, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, key: RequestKey) -> "tuple[array[int], ...]":
        """Per group the table; raises KeyError where there is none."""
        return self._tables[key]

    def of(self, slices: Iterable[SequenceSlice]) -> Tables:
        """Tables of these sequences, also when a later step has ended one of them.

        A later step changes no entry that a step in flight reads or writes.
        """
        return {part.key: self._tables[part.key] for part in slices}

    def apply(self, step: Step) -> None:
        """Forget what the step ends and make all its changes.

        Raises:
            ValueError: a slice's changes cannot be made. The other slices' were made all the
                same, and nothing is kept of this one's sequence.
        """
        for key in step.ended:
            self._forget(key)
        refusals = [refusal for part in step.slices if (refusal := self._apply(part))]
        if refusals:
            raise ValueError(refusals[0])

    def _apply(self, part: SequenceSlice) -> str:
        if part.is_new:
            self._tables[part.key] = tuple(array("q") for _ in range(self._num_groups))
            self._num_skipped[part.key] = (0,) * self._num_groups
        tables = self._tables.get(part.key)
        refusal = self._refusal(part, tables)
        if refusal or tables is None:
            self._forget(part.key)
            return refusal
        if part.table_changes:
            before = self._num_skipped[part.key]
            for table, change, first in zip(tables, part.table_changes, before, strict=True):
                table.extend(change.new_blocks)
                count = change.num_skipped - first
                if count:
                    table[first : change.num_skipped] = array("q", [NULL_BLOCK]) * count
            self._num_skipped[part.key] = tuple(one.num_skipped for one in part.table_changes)
        return ""

    def _refusal(self, part: SequenceSlice, tables: "tuple[array[int], ...] | None") -> str:
        if tables is None:
            return f"{part.key}: its block tables are not here"
        if not part.table_changes:
            return ""
        if len(part.table_changes) != self._num_groups:
            return (
                f"{part.key}: changes of {len(part.table_changes)} block tables "
                f"for {self._num_groups} groups"
            )
        before = self._num_skipped[part.key]
        for table, change, first in zip(tables, part.table_changes, before, strict=True):
            if not first <= change.num_skipped <= len(table) + len(change.new_blocks):
                return f"{part.key}: {change.num_skipped} entries skipped, {first} before"
            if change.new_blocks and not (
                min(change.new_blocks) >= 0 and max(change.new_blocks) < self._num_blocks
            ):
                return f"{part.key}: block id out of 0..{self._num_blocks - 1}"
        return ""

    def _forget(self, key: RequestKey) -> None:
        self._tables.pop(key, None)
        self._num_skipped.pop(key, None)
