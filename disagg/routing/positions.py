"""A compact table from chain values to the positions at which they are kept."""

from array import array
from collections.abc import Sequence

from disagg.errors import InvariantViolation
from disagg.routing.chain import OFFSET_BITS, VALUE_BYTES, Chain

_SHARDS = 256
_TAG_BITS = 30
_TAGS = (1 << _TAG_BITS) - 1
_POSITION_BITS = 64 - _TAG_BITS
_POSITIONS = (1 << _POSITION_BITS) - 1
_OFFSETS = (1 << OFFSET_BITS) - 1
CHAINS_MAX = 1 << (_POSITION_BITS - OFFSET_BITS)
_HOME_BITS = _POSITION_BITS + 8
"""Below those of a tag that say where in its shard an entry is looked for first."""


class PositionTable:
    """Positions by chain value; 12 to 18 bytes each, since it keeps no values itself.

    An entry is 30 bits of the value's hash and the position; equal bits are settled by the value
    that the chain has there. A dict would keep two objects per entry, about 150 bytes. It grows in
    256 parts, each on its own, so no insertion pays for a copy of the whole. What is removed leaves
    nothing behind: entries that it displaced move up.

    Args:
        chains: by number; a position is a chain's number and an offset in it.
    """

    def __init__(self, chains: Sequence[Chain | None]) -> None:
        self._chains = chains
        self._shards = [array("Q", bytes(64)) for _ in range(_SHARDS)]
        self._rooms = [5] * _SHARDS
        """So many may be put in until a shard is made anew."""

    def find(self, value: bytes) -> int:
        """Position of a value: chain number, then offset; -1 where there is none."""
        tag = hash(value) & _TAGS
        slots = self._shards[tag & 255]
        size = len(slots)
        slot = (tag >> 8) % size
        while entry := slots[slot]:
            if entry >> _POSITION_BITS == tag:
                position = entry & _POSITIONS
                chain = self._chains[position >> OFFSET_BITS]
                start = (position & _OFFSETS) * VALUE_BYTES
                if chain is not None and chain.values[start : start + VALUE_BYTES] == value:
                    return position
            slot += 1
            if slot == size:
                slot = 0
        return -1

    def next_known(self, values: Sequence[bytes], start: int, end: int) -> int:
        """Index of the first value in a range that has a position; ``end``: none."""
        shards = self._shards
        for i in range(start, end):
            tag = hash(values[i]) & _TAGS
            slots = shards[tag & 255]
            size = len(slots)
            slot = (tag >> 8) % size
            while entry := slots[slot]:
                if entry >> _POSITION_BITS == tag and self.find(values[i]) >= 0:
                    return i
                slot += 1
                if slot == size:
                    slot = 0
        return end

    def insert(self, values: Sequence[bytes], first: int) -> int:
        """Give ``first`` and the positions after it to values, until one has a position already.

        Args:
            values: of the blocks that are there already; the first one has no position.
            first: position of the first one.

        Returns:
            How many were put in.
        """
        shards, rooms, position = self._shards, self._rooms, first
        for tag in map(hash, values):
            tag &= _TAGS
            number = tag & 255
            if not rooms[number]:
                self._rebuild(number)
            slots = shards[number]
            size = len(slots)
            slot = (tag >> 8) % size
            while entry := slots[slot]:
                if entry >> _POSITION_BITS == tag and self.find(values[position - first]) >= 0:
                    return position - first
                slot += 1
                if slot == size:
                    slot = 0
            slots[slot] = tag << _POSITION_BITS | position
            rooms[number] -= 1
            position += 1
        return position - first

    def move(self, values: Sequence[bytes], old: int, new: int) -> None:
        """Values that were at one position and those after it are at another one and after it."""
        self._replace(values, old, new - old)

    def remove(self, values: Sequence[bytes], first: int) -> None:
        """Values that were at a position and those after it have none any more."""
        self._replace(values, first, None)

    def _replace(self, values: Sequence[bytes], first: int, way: int | None) -> None:
        shards, rooms, position = self._shards, self._rooms, first
        for tag in map(hash, values):
            tag &= _TAGS
            slots = shards[tag & 255]
            size = len(slots)
            slot = (tag >> 8) % size
            old = tag << _POSITION_BITS | position
            while (entry := slots[slot]) != old:
                if not entry:
                    raise InvariantViolation(f"no entry for position {position} in the index")
                slot += 1
                if slot == size:
                    slot = 0
            position += 1
            if way is not None:
                slots[slot] = old + way
                continue
            rooms[tag & 255] += 1
            gap = slot
            while True:  # what was put behind it because of it moves up
                slot += 1
                if slot == size:
                    slot = 0
                entry = slots[slot]
                if not entry:
                    break
                home = (entry >> _HOME_BITS) % size
                if gap < home <= slot or home <= slot < gap or slot < gap < home:
                    continue  # it would not be found before its first slot
                slots[gap] = entry
                gap = slot
            slots[gap] = 0

    def _rebuild(self, number: int) -> None:
        """Make a full shard half as large again."""
        entries = list(filter(None, self._shards[number]))
        size = 9 * len(entries) // 4 + 4
        slots = array("Q", bytes(8 * size))
        for entry in entries:
            slot = (entry >> _HOME_BITS) % size
            while slots[slot]:
                slot += 1
                if slot == size:
                    slot = 0
            slots[slot] = entry
        self._shards[number], self._rooms[number] = slots, 7 * size // 10 - len(entries)
