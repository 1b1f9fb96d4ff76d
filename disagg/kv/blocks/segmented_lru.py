"""Free cached blocks in two segments: those that somebody has found again go last."""

from collections.abc import Iterable, Iterator, Sequence, Sized

from disagg.errors import InvariantViolation
from disagg.kv.blocks.free_blocks import CachedBlocks

FOUND_SHARE_MAX = 0.8
"""Of the free blocks, those kept for having been found: the rest is for new contents."""


class SegmentedBlocks:
    """Segmented LRU: prompts seen once do not displace what was found again.

    A block enters the segment of new contents; one that a request has found since its content was
    cached enters the other. Both are evicted least recently freed first, the new one before. Where
    the other exceeds its share, its oldest become the newest of the first, as if never found.

    Args:
        uncached: the free blocks without a content; while there are many, nothing is given up.
    """

    __slots__ = ("_found", "_marked", "_new", "_uncached")

    def __init__(self, uncached: Sized = ()) -> None:
        self._uncached = uncached
        self._new = CachedBlocks()
        self._found = CachedBlocks()
        self._marked: set[int] = set()
        """Blocks whose content was found, free or held."""

    def __len__(self) -> int:
        return len(self._new) + len(self._found)

    def __contains__(self, block: object) -> bool:
        return block in self._new or block in self._found

    def __iter__(self) -> Iterator[int]:
        yield from self._new
        yield from self._found

    def has_all(self, block_ids: Sequence[int]) -> bool:
        """Whether all of these blocks are among them."""
        return self.num_among(block_ids) == len(block_ids)

    def num_among(self, block_ids: Iterable[int]) -> int:
        """How many of these different blocks are among them."""
        blocks = set(block_ids)
        return self._new.num_among(blocks) + self._found.num_among(blocks)

    def add(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """Take blocks back; in its segment the last one is now the most recently freed.

        With ``evict_first`` they are the next to be evicted, as if nobody had found them.

        Raises:
            InvariantViolation: one was here already.
        """
        if self.num_among(block_ids):
            raise InvariantViolation("a block becomes free twice")
        marked = self._marked
        if evict_first:
            marked.difference_update(block_ids)
        if marked.isdisjoint(block_ids):
            self._new.add(block_ids, evict_first=evict_first)
            return
        self._new.add([block for block in block_ids if block not in marked])
        self._found.add([block for block in block_ids if block in marked])
        num_free = len(self) + len(self._uncached)
        too_many = len(self._found) - int(FOUND_SHARE_MAX * num_free)
        if too_many > 0:
            older = self._found.take(too_many)
            marked.difference_update(older)
            self._new.add(older)

    def oldest(self, num_blocks: int) -> list[int]:
        """Those that ``take`` would remove now, as far as there are so many; nothing changes."""
        new = self._new.oldest(num_blocks)
        return new + self._found.oldest(num_blocks - len(new))

    def remove(self, block_ids: Sequence[int]) -> None:
        """Remove blocks, which are held again."""
        found = [block for block in block_ids if block in self._found]
        self._found.remove(found)
        self._new.remove([block for block in block_ids if block in self._new])

    def take(self, num_blocks: int) -> list[int]:
        """Remove and return the first to be evicted; the caller checked the length."""
        num_new = min(num_blocks, len(self._new))
        return self._new.take(num_new) + self._found.take(num_blocks - num_new)

    def found(self, block_ids: Sequence[int]) -> None:
        """Note that a request found the content of these blocks, held or free."""
        self._marked.update(block_ids)

    def gone(self, block_ids: Iterable[int]) -> None:
        """Note that these blocks have lost their content."""
        self._marked.difference_update(block_ids)

    def clear(self) -> None:
        """Forget all free blocks and what was noted."""
        self._new.clear()
        self._found.clear()
        self._marked.clear()

    def check(self) -> None:
        """Verify both segments; raises InvariantViolation."""
        self._new.check()
        self._found.check()
        if not self._marked.issuperset(self._found):
            raise InvariantViolation("a block counts as found that nobody has found")
        if not self._marked.isdisjoint(self._new):
            raise InvariantViolation("a block that was found counts as new")
