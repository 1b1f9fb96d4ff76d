"""Which block has which content: the prefix cache, apart from who holds it."""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter

from disagg.errors import InvariantViolation

_FIRST_PART = 128
"""Values compared at once at the start of a run; doubled as long as all are equal."""
_ONE = [(0, 1)]


class PrefixCache:
    """Per group an index from chain value to block, and per block its group and value.

    Neighbouring blocks of a prefix usually lie side by side in the pool, as they were allocated.
    So a run of values is looked up by one probe, and by comparing a slice of ``_value_of`` with
    the values looked for; where that fails, by a probe each.

    Args:
        block_ids: 0, 1, .. : the integers that the pool hands out. Slices of it are compared with
            tables and handed out again, which is fastest where they are the same objects.
        num_groups: number of indexes.
    """

    def __init__(self, block_ids: Sequence[int], num_groups: int) -> None:
        num_blocks = len(block_ids)
        self._block_ids = list(block_ids)
        self._value_of: list[bytes | None] = [None] * num_blocks
        self._group_of = array("H", bytes(2 * num_blocks))
        self._index: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._copies: list[dict[bytes, list[int]]] = [{} for _ in range(num_groups)]

    # -- finding ------------------------------------------------------------------------------

    def index(self, group: int) -> Mapping[bytes, int]:
        """Live view: chain value -> block that was cached first under it and still is."""
        return self._index[group]

    def has(self, block: int) -> bool:
        """Whether the block can be found."""
        return self._value_of[block] is not None

    def content(self, block: int) -> tuple[int, bytes] | None:
        """Group and chain value of what a block has, if it can be found."""
        value = self._value_of[block]
        return None if value is None else (self._group_of[block], value)

    def num_found(self, group: int) -> int:
        """Blocks of a group that can be found, copies included."""
        return len(self._index[group]) + sum(map(len, self._copies[group].values()))

    def num_found_among(self, group: int, block_ids: Collection[int]) -> int:
        """How many of these blocks can be found in a group's index."""
        found = (block for block in block_ids if self._value_of[block] is not None)
        return sum(self._group_of[block] == group for block in found)

    def values(self) -> tuple[tuple[bytes, ...], ...]:
        """Per group every value that can be found now."""
        return tuple(map(tuple, self._index))

    def leading_run(self, group: int, values: Sequence[bytes], end: int) -> list[int]:
        """Blocks of ``values[:end]`` up to the first that is not cached.

        Prefixes are evicted from their ends, so a few probes tell where the run probably ends;
        a hole before that ends it there.
        """
        index = self._index[group]
        end = min(end, len(values))
        if end and values[end - 1] not in index:
            end = bisect_left(range(end), True, key=lambda place: values[place] not in index)
        found: list[int] = []
        size = _FIRST_PART
        while len(found) < end:
            part = values[len(found) : min(len(found) + size, end)]
            first = index.get(part[0])
            if first is None:
                break
            side = slice(first, first + len(part))
            if self._is_run(group, side, part):
                found += self._block_ids[side]
                size *= 2
                continue
            size = _FIRST_PART
            try:
                found += look_up(index, part[:size])
            except KeyError as hole:
                found += look_up(index, part[: part.index(hole.args[0])])
                break
        return found

    def _is_run(self, group: int, side: slice, values: Sequence[bytes]) -> bool:
        """Whether these neighbours have these values, and are the first to have them."""
        return (
            self._value_of[side] == values
            and not self._copies[group]
            and self._group_of[side] == array("H", [group]) * len(values)
        )

    def neighbours(self, block_ids: list[int]) -> slice | None:
        """The slice of the pool that these blocks are, ascending or descending; None if none."""
        first, last = block_ids[0], block_ids[-1]
        if first <= last:
            side = slice(first, last + 1)
            return side if block_ids == self._block_ids[side] else None
        # The null block is in no list, so ``last - 1`` is never negative.
        alike = block_ids == self._block_ids[first : last - 1 : -1]
        return slice(last, first + 1) if alike else None

    # -- changing -----------------------------------------------------------------------------

    def store(
        self, group: int, block_ids: list[int], values: Sequence[bytes], deduplicate: bool
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Make blocks without a content findable.

        Returns:
            The ranges of ``values`` that were not known, and the blocks that are cached now: with
            ``deduplicate`` a block whose value is known stays out, else both copies are in.
        """
        index = self._index[group]
        if len(block_ids) == 1 and values[0] not in index:  # as decodes do
            index[values[0]] = block = block_ids[0]
            self._value_of[block] = values[0]
            self._group_of[block] = group
            return _ONE, block_ids
        firsts = list(map(index.setdefault, values, block_ids))
        if firsts == block_ids:
            self._note_values(group, block_ids, values)
            return [(0, len(block_ids))], block_ids
        copies = self._copies[group]
        runs: list[tuple[int, int]] = []
        stored: list[int] = []
        for place, (block, value, first) in enumerate(zip(block_ids, values, firsts, strict=True)):
            if first == block:
                if runs and runs[-1][1] == place:
                    runs[-1] = (runs[-1][0], place + 1)
                else:
                    runs.append((place, place + 1))
            elif deduplicate:
                continue
            else:
                copies.setdefault(value, []).append(block)
            self._value_of[block] = value
            self._group_of[block] = group
            stored.append(block)
        return runs, stored

    def _note_values(self, group: int, block_ids: list[int], values: Sequence[bytes]) -> None:
        side = self.neighbours(block_ids)
        if side is not None and block_ids[0] == side.start:
            self._value_of[side] = values
            self._group_of[side] = array("H", [group]) * len(block_ids)
        else:
            deque(map(self._value_of.__setitem__, block_ids, values), maxlen=0)
            deque(map(self._group_of.__setitem__, block_ids, repeat(group)), maxlen=0)

    def take_out(self, block_ids: Iterable[int]) -> dict[int, list[bytes]]:
        """Forget what these blocks have; returns per group the values that are gone for good."""
        removed: dict[int, list[bytes]] = {}
        for block in block_ids:
            group, value = self._group_of[block], self._value_of[block]
            assert value is not None, "a cached block has a value"
            self._value_of[block] = None
            if self._forget_copy(group, value, block):
                removed.setdefault(group, []).append(value)
        return removed

    def _forget_copy(self, group: int, value: bytes, block: int) -> bool:
        """Take a block out of the index; true if it was the last copy."""
        copies = self._copies[group].get(value) if self._copies[group] else None
        if not copies:
            del self._index[group][value]
            return True
        if self._index[group][value] == block:
            self._index[group][value] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[group][value]
        return False

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that were cached."""
        cached = [block for block, value in enumerate(self._value_of) if value is not None]
        self._value_of = [None] * len(self._value_of)
        for index, copies in zip(self._index, self._copies, strict=True):
            index.clear()
            copies.clear()
        return cached

    def check(self) -> None:
        """Verify that the indexes and the blocks' values agree; raises InvariantViolation."""
        found: dict[int, tuple[int, bytes]] = {}
        for group, (index, copies) in enumerate(zip(self._index, self._copies, strict=True)):
            found.update((block, (group, value)) for value, block in index.items())
            for value, blocks in copies.items():
                if not blocks or value not in index:
                    raise InvariantViolation(f"copies without a first in group {group}")
                found.update((block, (group, value)) for block in blocks)
        values = enumerate(self._value_of)
        if found != {b: (self._group_of[b], value) for b, value in values if value is not None}:
            raise InvariantViolation("index and values of blocks disagree")


def look_up(index: Mapping[bytes, int], values: Sequence[bytes]) -> list[int]:
    """Block of each value; raises KeyError if one is not cached."""
    if len(values) > 1:
        return list(itemgetter(*values)(index))
    return [index[value] for value in values]
