"""A compact table from chain values to the positions at which they are kept."""

from array import array
from collections.abc import Sequence
from struct import Struct

import numpy as np

from disagg.routing.buckets import KEPT_MAX, POSITION_BITS, Buckets, Words
from disagg.routing.chain import OFFSET_BITS, VALUE_BYTES, Chain

_OFFSETS = (1 << OFFSET_BITS) - 1
CHAINS_MAX = 1 << (POSITION_BITS - OFFSET_BITS)
_MANY = 48
"""From so many values on arrays are faster than a loop."""
_PACKED_MIN = KEPT_MAX * VALUE_BYTES
"""With fewer values there are zeros behind them, or numpy would keep the memory of each size."""
_SORTED_MIN = 512
"""From so many values on it takes less time to sort numbers than to make a set of them."""
_WAITING_MAX = 1024
"""So many changes wait to be made at once."""
_FOUND_MAX = 128
"""Of the values that prompts had, until all are forgotten."""
AT_ONCE_MAX = 2048
"""With more values what is computed of them leaves the processor's caches."""
_WORDS = (1 << 64) - 1
_SECRET = hash(b"which buckets blocks go into") & _WORDS | 1
"""Python's hash is another one in every process: or a client could choose prompts whose blocks all
go into the same buckets."""
_first_word = Struct("Q").unpack_from


class PositionTable:
    """Positions by chain value; 12 to 24 bytes each, since it keeps no values itself.

    Equal entries are settled by the value that the chain has there. A dict would keep two objects
    per entry, about 150 bytes. Few new values wait in one all the same, and those removed in a
    list, until they are many: `Buckets` are fast with many at once. Entries of removed ones name
    positions at which the chains have something else meanwhile, or nothing.

    Args:
        chains: by number; a position is a chain's number and an offset in it.
    """

    def __init__(self, chains: Sequence[Chain | None]) -> None:
        self._chains = chains
        self._buckets = Buckets()
        self._coming: dict[bytes, int] = {}
        """Positions of new values."""
        self._coming_chains: set[int] = set()
        """Numbers of the chains in which these are."""
        self._leaving, self._left = bytearray(), array("Q")
        """Packed values that were removed, and where they were."""
        self._crowded: dict[bytes, int] = {}
        """Positions of values for which the buckets have no room. Only a worker that is broken, or
        means harm, has values whose first 64 bits are alike, and it costs no more than a dict."""
        self._found: dict[bytes, int] = {}
        """What prompts had last: beginnings that they have in common are found so in no time."""

    def find(self, value: bytes) -> int:
        """Position of a value: chain number, then offset; -1 where there is none."""
        position = self._coming.get(value, -1)
        if position >= 0 or len(value) != VALUE_BYTES:
            return position
        for position in self._buckets.positions(_first_word(value)[0] * _SECRET & _WORDS):
            if self._is_at(value, position):
                return position
        return self._crowded.get(value, -1)

    def find_again(self, value: bytes) -> int:
        """The same of a prompt's value; faster where it was found before."""
        position = self._found.get(value, -1)
        if position >= 0 and self._is_at(value, position):
            return position
        position = self.find(value)
        if position >= 0:
            if len(self._found) >= _FOUND_MAX:
                self._found.clear()
            self._found[value] = position
        return position

    def _is_at(self, value: bytes, position: int) -> bool:
        chain = self._chains[position >> OFFSET_BITS]
        start = (position & _OFFSETS) * VALUE_BYTES
        return chain is not None and chain.values.startswith(value, start)

    def next_known(self, values: Sequence[bytes], start: int, end: int) -> int:
        """Index of the first value in a range that has a position; ``end``: none."""
        if end - start < _MANY:
            return next((i for i in range(start, end) if self.find(values[i]) >= 0), end)
        self._settle()
        for begin in range(start, end, AT_ONCE_MAX):
            some = values[begin : min(begin + AT_ONCE_MAX, end)]
            found = self._first_known(some, b"".join(some))
            if found < len(some):
                return begin + found
        return end

    def insert(self, values: Sequence[bytes], packed: bytes | bytearray, first: int) -> int:
        """Give ``first`` and the positions after it to values, until one has a position already.

        Args:
            values: of new blocks; the first one has no position.
            packed: the same.
            first: position of the first one.

        Returns:
            How many were put in: perhaps fewer where one of them is there twice.
        """
        num = len(values)
        if num < _MANY:
            self._coming_chains.add(first >> OFFSET_BITS)
            for position, value in enumerate(values, first):
                if position > first and self.find(value) >= 0:
                    return position - first
                self._coming[value] = position
        else:
            if _is_one_twice(values, packed):
                return self.insert(values[: _MANY - 1], packed, first)
            num = self._first_known(values, packed)
            if num < _WAITING_MAX // 2:
                self._coming_chains.add(first >> OFFSET_BITS)
                self._coming.update(zip(values[:num], range(first, first + num), strict=True))
            else:
                self._take_out()
                self._put(values[:num], _mixed(packed)[:num], _positions(first, num))
        if len(self._coming) >= _WAITING_MAX:
            self._settle()
        return num

    def move(self, packed: bytes, old: int, new: int) -> None:
        """Values that were at one position and those after it are at another one and after it."""
        self._settle()
        mixed = _mixed(packed)
        positions = _positions(old, len(mixed))
        if self._crowded:
            values = _cut(packed)
            there = [i for i, value in enumerate(values) if value in self._crowded]
            self._crowded.update((values[i], new + i) for i in there)
            mixed, positions = np.delete(mixed, there), np.delete(positions, there)
        self._buckets.move(mixed, positions, new - old)

    def remove(self, packed: bytes, first: int) -> None:
        """Values that were at a position and those after it have none any more."""
        if not self._crowded and first >> OFFSET_BITS not in self._coming_chains:
            self._leaving += packed
            self._left.extend(range(first, first + len(packed) // VALUE_BYTES))
        else:
            for position, value in enumerate(_cut(packed), first):
                if self._coming.pop(value, -1) < 0 and self._crowded.pop(value, -1) < 0:
                    self._leaving += value
                    self._left.append(position)
        if len(self._left) >= _WAITING_MAX:
            self._take_out()

    def _first_known(self, values: Sequence[bytes], packed: bytes | bytearray) -> int:
        """Number of the values before the first one that has a position."""
        num = len(values)
        for known in (self._coming, self._crowded):
            if known and not known.keys().isdisjoint(values):  # each value is hashed for that
                num = next((i for i, value in enumerate(values[:num]) if value in known), num)
        alike = self._buckets.some_alike(_mixed(packed.ljust(_PACKED_MIN, b"\0")))
        return next((i for i in alike if i < num and self.find(values[i]) >= 0), num)

    def _settle(self) -> None:
        """Make the changes that wait."""
        self._take_out()
        if self._coming:
            values = list(self._coming)
            positions = np.fromiter(self._coming.values(), np.uint64, len(values))
            self._put(values, _mixed(b"".join(values)), positions)
            self._coming, self._coming_chains = {}, set()

    def _put(self, values: Sequence[bytes], mixed: Words, positions: Words) -> None:
        """Enter values that have no position."""
        for i in self._buckets.put(mixed, positions).tolist():
            self._crowded[values[i]] = int(positions[i])

    def _take_out(self) -> None:
        """Clear the entries of all that was removed."""
        if self._left:
            self._buckets.take_out(_mixed(self._leaving), np.frombuffer(self._left, np.uint64))
            self._leaving, self._left = bytearray(), array("Q")


def _cut(packed: bytes) -> list[bytes]:
    return [packed[at : at + VALUE_BYTES] for at in range(0, len(packed), VALUE_BYTES)]


def _mixed(packed: bytes | bytearray) -> Words:
    """The first 64 bits of each value, mixed."""
    words: Words = np.frombuffer(packed, np.uint64)[:: VALUE_BYTES // 8] * np.uint64(_SECRET)
    return words


def _is_one_twice(values: Sequence[bytes], packed: bytes | bytearray) -> bool:
    """Whether one of these values is among them again."""
    if len(values) < _SORTED_MIN:
        return len(set(values)) < len(values)
    ordered = np.sort(_mixed(packed)[: len(values)])
    return not (ordered[1:] - ordered[:-1]).all()


def _positions(first: int, num: int) -> Words:
    return np.arange(first, first + num, dtype=np.uint64)
