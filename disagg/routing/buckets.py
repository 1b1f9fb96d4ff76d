"""Positions in buckets of eight, in two arrays on which many values are worked at once."""

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import InvariantViolation

POSITION_BITS = 34
_POSITIONS = (1 << POSITION_BITS) - 1
_BUCKETS = 512
"""Of a segment; numbers in it have the 9 bits of `_other`."""
_SLOTS = 8 * _BUCKETS
_SEGMENT_MAX = 7 * _SLOTS // 8
"""So many entries of a segment; with more, both buckets of a value are often full."""
KEPT_MAX = 128
"""Numpy keeps some memory of each size below so many words for itself, half a megabyte in all."""
_MANY = 48
"""So many are compared at once faster than by a loop."""
_SPLIT_MIN = _SLOTS // 2
"""With fewer, both buckets of a value are full by chance never, but of values that are alike."""
_EACH = 0x0101010101010101
"""Times a byte: that byte eight times."""
_TAKEN = 0x80
"""The bit that all marks have and no free slot has."""
_TAKENS = _TAKEN * _EACH

Words = NDArray[Any]
"""Of uint64; what operators make of it, the types of numpy say wrongly."""
Indexes = NDArray[np.int64]


class Buckets:
    """Positions by 64 random bits, 12 to 24 bytes each.

    The bits say a segment, two buckets there, of which mostly the emptier one takes it, and a mark:
    a byte per slot, by which the eight of a bucket are compared at once. An entry is 30 of the bits
    and the position. A full segment is split in two, so nothing pays for a copy of the whole.
    """

    def __init__(self) -> None:
        self._entries = array("Q", bytes(8 * _SLOTS))
        self._marks = bytearray(_SLOTS)
        """By slot, as the entries."""
        self._firsts = array("Q", [0])
        """First bucket of the segment, by the lowest of an entry's bits."""
        self._depths = [0]
        """Of each segment, how many of these bits are the same in all its entries."""
        self._num_used = array("q", [0])
        """Entries of each segment."""

    def positions(self, bits: int) -> list[int]:
        """Of the entries that have these bits, as far as an entry has them."""
        mark, marks, found = bits >> 26 & 255 | _TAKEN, self._marks, []
        bucket = self._firsts[bits >> POSITION_BITS & len(self._firsts) - 1] | bits >> 55
        for begin in (bucket << 3, (bucket ^ (mark << 1 | 1)) << 3):  # `_other`, without a call
            slot = marks.find(mark, begin, begin + 8)
            while slot >= 0:
                entry = self._entries[slot]
                if (entry ^ bits) >> POSITION_BITS == 0:
                    found.append(entry & _POSITIONS)
                slot = marks.find(mark, slot + 1, begin + 8)
        return found

    def some_alike(self, bits: Words) -> list[int]:
        """Indexes of those for which `positions` finds any, and perhaps of some others."""
        buckets = self._both(bits)
        differ = np.frombuffer(self._marks, np.uint64)[buckets] ^ _marks_of(bits) * _EACH
        equal = (differ - _EACH) & ~differ & _TAKENS  # a byte of a difference is 0
        some = np.flatnonzero(equal[0] | equal[1])
        if len(some) >= _MANY:
            entries = np.frombuffer(self._entries, np.uint64).reshape(-1, 8)[buckets[:, some]]
            alike = (entries ^ bits[some, None]) >> POSITION_BITS == 0
            some = some[(alike & (entries != 0)).any(axis=(0, 2))]
        found: list[int] = some.tolist()
        return found

    def put(self, bits: Words, positions: Words) -> Indexes:
        """Enter positions, in any order.

        Returns:
            Indexes of those that are not in, as too many others have the same bits: to split their
            segment would help only where the bits differ, and each time it doubles `_firsts`.
        """
        one, other = self._make_room(bits)
        self._count(one, 1)
        entries, marks = _entries_of(bits, positions), _marks_of(bits).astype(np.uint8)
        left = np.arange(len(bits))
        while len(left) >= KEPT_MAX:
            lost = self._put_at_once(one[left], other[left], entries[left], marks[left])
            if len(lost) == len(left):
                break
            left = left[lost]
        stuck: list[int] = []
        for i in left.tolist():
            slot = self._free_slot(int(one[i]), int(other[i]))
            if slot < 0:
                stuck.append(i)
            else:
                self._entries[slot], self._marks[slot] = entries[i], marks[i]
        out = np.array(stuck, np.int64)
        if not stuck:
            return out
        self._count(one[out], -1)
        segments = one[out] // _BUCKETS
        differ = np.frombuffer(self._num_used, np.int64)[segments] >= _SPLIT_MIN
        again, out = out[differ], out[~differ]
        if len(again):
            self._split(int(segments[differ][-1]))
            out = np.concatenate((out, again[self.put(bits[again], positions[again])]))
        return out

    def take_out(self, bits: Words, positions: Words) -> None:
        """Clear entries.

        Raises:
            InvariantViolation: there are no such entries.
        """
        slots = self._slots_of(bits, positions)
        np.frombuffer(self._entries, np.uint64)[slots] = 0
        np.frombuffer(self._marks, np.uint8)[slots] = 0
        self._count(slots >> 3, -1)

    def move(self, bits: Words, positions: Words, way: int) -> None:
        """Change positions by ``way``; raises as `take_out`."""
        slots = self._slots_of(bits, positions)
        np.frombuffer(self._entries, np.int64)[slots] += way

    def _put_at_once(self, one: Indexes, other: Indexes, mine: Words, marks: Words) -> Indexes:
        """Enter entries, each into the emptier one of its buckets; returns which did not get in."""
        entries = np.frombuffer(self._entries, np.uint64)
        kept = np.frombuffer(self._marks, np.uint8)
        words = kept.view(np.uint64)
        free, frees = ~words[one] & _TAKENS, ~words[other] & _TAKENS
        emptier = np.bitwise_count(frees) > np.bitwise_count(free)
        bucket, free = np.where(emptier, other, one), np.where(emptier, frees, free)
        slots = 8 * bucket + (np.bitwise_count(free - 1 & ~free) >> 3 & 7)  # the first free one
        entries[slots] = np.where(free, mine, entries[slots])
        stays = entries[slots] == mine  # of several for one slot the last one, of full buckets none
        kept[slots[stays]] = marks[stays]
        return np.flatnonzero(~stays)

    def _free_slot(self, one: int, other: int) -> int:
        """A slot in one of two buckets; -1: both are full, and nothing there can go elsewhere."""
        marks, entries = self._marks, self._entries
        free = marks.find(0, 8 * one, 8 * one + 8)
        if free < 0:
            free = marks.find(0, 8 * other, 8 * other + 8)
        if free >= 0:
            return free
        for slot in range(8 * one, 8 * one + 8):
            to = 8 * _other(one, marks[slot])
            free = marks.find(0, to, to + 8)
            if free >= 0:
                entries[free], marks[free] = entries[slot], marks[slot]
                return slot
        return -1

    def _both(self, bits: Words) -> Indexes:
        """Numbers of the two buckets of each: a row of the ones, a row of the others."""
        both = np.empty((2, len(bits)), np.uint64)
        one, other = both
        lowest = bits >> POSITION_BITS & (len(self._firsts) - 1)
        one[:] = np.frombuffer(self._firsts, np.uint64)[lowest.view(np.int64)] | bits >> 55
        other[:] = _other(one, _marks_of(bits))
        return both.view(np.int64)

    def _slots_of(self, bits: Words, positions: Words) -> Indexes:
        """Slots of entries, in any order."""
        mine, (one, other) = _entries_of(bits, positions), self._both(bits)
        buckets = np.frombuffer(self._entries, np.uint64).reshape(-1, 8)
        at = np.flatnonzero(buckets[one] == mine[:, None])
        elsewhere = np.ones(len(bits), bool)
        elsewhere[at >> 3] = False
        rest = np.flatnonzero(elsewhere)
        other = other[rest]
        ats = np.flatnonzero(buckets[other] == mine[rest, None])
        slots = np.concatenate((8 * one[at >> 3] + (at & 7), 8 * other[ats >> 3] + (ats & 7)))
        if len(slots) != len(bits):
            raise InvariantViolation("the index lacks entries of blocks that it has")
        return slots

    def _count(self, buckets: Indexes, way: int) -> None:
        nums = np.bincount(buckets // _BUCKETS, minlength=len(self._depths))
        np.frombuffer(self._num_used, np.int64)[:] += way * nums

    def _make_room(self, bits: Words) -> tuple[Indexes, Indexes]:
        """Split segments until none gets too many of these; returns their buckets."""
        while True:
            one, other = self._both(bits)
            nums = np.bincount(one // _BUCKETS, minlength=len(self._depths))
            full = np.flatnonzero(nums + np.frombuffer(self._num_used, np.int64) > _SEGMENT_MAX)
            if not len(full):
                return one, other
            for segment in full.tolist():
                self._split(segment)

    def _split(self, segment: int) -> None:
        """Half of a segment's entries go to a new one, to the same buckets there."""
        depth, number = self._depths[segment], len(self._depths)
        if 1 << depth == len(self._firsts):
            self._firsts += self._firsts
        lowest = self._firsts.index(segment * _BUCKETS)
        for at in range(lowest | 1 << depth, len(self._firsts), 2 << depth):
            self._firsts[at] = number * _BUCKETS
        self._depths[segment] = depth + 1
        self._depths.append(depth + 1)
        begin = segment * _SLOTS
        entries = np.frombuffer(self._entries, np.uint64)[begin : begin + _SLOTS]
        leave = entries & (1 << POSITION_BITS + depth) != 0
        del entries  # or nothing could be added
        self._entries.frombytes(bytes(8 * _SLOTS))
        self._marks += bytes(_SLOTS)
        for kept in np.frombuffer(self._entries, np.uint64), np.frombuffer(self._marks, np.uint8):
            np.copyto(kept[-_SLOTS:], kept[begin : begin + _SLOTS], where=leave)
            kept[begin : begin + _SLOTS][leave] = 0
        num = int(leave.sum())
        self._num_used[segment] -= num
        self._num_used.append(num)


def _other(bucket: Any, mark: Any) -> Any:
    """The other bucket of what has a mark in one; of both each is the other's, never the same."""
    return bucket ^ (mark << 1 | 1)


def _marks_of(bits: Words) -> Words:
    return bits >> 26 & 255 | _TAKEN


def _entries_of(bits: Words, positions: Words) -> Words:
    return bits >> POSITION_BITS << POSITION_BITS | positions
