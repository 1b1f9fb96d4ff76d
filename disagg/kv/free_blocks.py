"""Free blocks without a cached content, handed out in adjacent runs where possible."""

from collections.abc import Iterator, Sequence


class UncachedBlocks:
    """Two stacks: ``_runs`` is sorted (its tail is one long run), ``_loose`` came back lately.

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
