"""Workers by a figure of theirs, in order: who has the lowest is found without a look at each."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", int, tuple[int, int])


class Ranking(Generic[Key]):
    """Bits of workers by key; each worker has one."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        """Each once, lowest first."""
        self._masks: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    def put(self, bit: int, key: Key) -> None:
        """A worker has this key from now on."""
        before = self._key_of.get(bit)
        if before is not None:
            if before == key:
                return
            self.remove(bit)
        self._key_of[bit] = key
        if key in self._masks:
            self._masks[key] |= bit
        else:
            self._masks[key] = bit
            insort(self._keys, key)

    def remove(self, bit: int) -> None:
        """Forget a worker."""
        key = self._key_of.pop(bit)
        mask = self._masks[key] ^ bit
        if mask:
            self._masks[key] = mask
        else:
            del self._masks[key], self._keys[bisect_left(self._keys, key)]

    def within(self, bits: int) -> Iterator[tuple[Key, int]]:
        """Keys of these workers, lowest first, and who has them."""
        masks = self._masks
        for key in self._keys:
            if found := masks[key] & bits:
                yield key, found
                bits ^= found
                if not bits:
                    return

    def lowest(self, bits: int) -> int:
        """Those of these workers that have the lowest key; 0 of none."""
        masks = self._masks
        for key in self._keys:
            if found := masks[key] & bits:
                return found
        return 0

    @property
    def keys(self) -> tuple[Key, ...]:
        """All that workers have, lowest first."""
        return tuple(self._keys)

    def lowest_from(self, key: Key) -> Key | None:
        """The lowest key that is not below this one; None where there is none."""
        return next(iter(self._keys[bisect_left(self._keys, key) :]), None)

    def at_least(self, key: Key) -> int:
        """Workers with this key or a higher one."""
        found = 0
        for number in range(bisect_left(self._keys, key), len(self._keys)):
            found |= self._masks[self._keys[number]]
        return found
