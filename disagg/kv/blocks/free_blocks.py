"""Free blocks: those without a content in adjacent runs, cached ones in order of eviction."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from disagg.errors import InvariantViolation


class UncachedBlocks:
    """Free blocks without a cached content, handed out in adjacent runs where possible.

    Two stacks: ``_runs`` is sorted (its tail is one long run), ``_loose`` came back lately.

    Neighbours merge into one descriptor of a transfer, so a large allocation comes from the
    sorted stack and small ones use up what is loose. Sorting happens only when a stack runs
    dry, so it is amortised.
    """

    __slots__ = ("_loose", "_runs")

    def __init__(self, first: int, end: int) -> None:
        self._runs = list(range(end - 1, first - 1, -1))
        self._loose: list[int] = []

    def __len__(self) -> int:
        return len(self._runs) + len(self._loose)

    def __iter__(self) -> Iterator[int]:
        yield from self._runs
        yield from self._loose

    def add(self, block_ids: Sequence[int]) -> None:
        """Take blocks back."""
        self._loose += block_ids

    def take(self, num_blocks: int) -> list[int]:
        """Remove and return ``num_blocks`` ids, ascending; the caller checked the length."""
        if num_blocks <= 0:
            return []
        if num_blocks > len(self._loose):
            if num_blocks > len(self._runs):
                self._runs += self._loose
                self._runs.sort(reverse=True)
                self._loose = []
            taken = self._runs[-num_blocks:]
            del self._runs[-num_blocks:]
            taken.reverse()
            return taken
        taken = self._loose[-num_blocks:]
        del self._loose[-num_blocks:]
        taken.sort()
        return taken


class CachedBlocks:
    """Free blocks with a cached content, least recently freed first.

    A block that is held again leaves its entry in the queue; such entries are counted per block
    and passed over when they come up. So freeing costs a set insertion per block and no search.
    """

    __slots__ = ("_free", "_queue", "_stale")

    def __init__(self) -> None:
        self._free: set[int] = set()
        self._queue: deque[int] = deque()
        self._stale: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._free)

    def __contains__(self, block: object) -> bool:
        return block in self._free

    def __iter__(self) -> Iterator[int]:
        return iter(self._free)

    def has_all(self, block_ids: Sequence[int]) -> bool:
        """Whether all of these blocks are among them."""
        return self._free.issuperset(block_ids)

    def num_among(self, block_ids: Iterable[int]) -> int:
        """How many of these different blocks are among them."""
        return len(self._free.intersection(block_ids))

    def add(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """Take blocks back; the last one is now the most recently freed.

        With ``evict_first`` the first one is the next to be evicted: an entry of it that was passed
        over comes to count again, in the new one's place, and no later than that.

        Raises:
            InvariantViolation: one was here already.
        """
        expected = len(self._free) + len(block_ids)
        self._free.update(block_ids)
        if len(self._free) != expected:
            raise InvariantViolation("a block becomes free twice")
        if evict_first:
            self._queue.extendleft(reversed(block_ids))
        else:
            self._queue.extend(block_ids)

    def oldest(self, num_blocks: int) -> list[int]:
        """Those that ``take`` would remove now, as far as there are so many; nothing changes."""
        found: list[int] = []
        passed: Counter[int] = Counter()
        for block in self._queue:
            if len(found) >= num_blocks:
                break
            if passed[block] < self._stale.get(block, 0):
                passed[block] += 1
            else:
                found.append(block)
        return found

    def remove(self, block_ids: Sequence[int]) -> None:
        """Remove blocks, which are held again."""
        self._free.difference_update(block_ids)
        if not self._free:
            self.clear()
            return
        self._stale.update(block_ids)
        if len(self._queue) > 2 * len(self._free) + 1024:
            newest_first = dict.fromkeys(reversed(self._queue))
            self._queue = deque(filter(self._free.__contains__, reversed(newest_first)))
            self._stale.clear()

    def take(self, num_blocks: int) -> list[int]:
        """Remove and return the least recently freed; the caller checked the length."""
        taken: list[int] = []
        pop, stale = self._queue.popleft, self._stale
        while len(taken) < num_blocks:
            block = pop()
            if block not in stale:
                taken.append(block)
            elif stale[block] > 1:
                stale[block] -= 1
            else:
                del stale[block]
        self._free.difference_update(taken)
        return taken

    def found(self, block_ids: Sequence[int]) -> None:
        """Nothing to note: only when a block becomes free counts."""

    def gone(self, block_ids: Iterable[int]) -> None:
        """Nothing was noted of these blocks."""

    def clear(self) -> None:
        """Forget all free blocks."""
        self._free.clear()
        self._queue.clear()
        self._stale.clear()

    def check(self) -> None:
        """Verify that each block has one entry that counts; raises InvariantViolation."""
        entries = Counter(self._queue)
        entries.subtract(self._stale)
        if {block for block, count in entries.items() if count} != self._free or any(
            count not in (0, 1) for count in entries.values()
        ):
            raise InvariantViolation("the eviction queue does not match the cached free blocks")
