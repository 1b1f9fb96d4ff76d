"""Blocks kept back because a promise counts on blocks that others hold as well."""

from collections.abc import Callable, Iterable

from disagg.errors import InvariantViolation


class Slack:
    """One block is kept back per shared block that a promise expects back (see promises).

    A promised request that drops a block which others hold frees nothing by it, but counts on it;
    so one block stays free in its place, for as long as both is so.

    Args:
        num_holds: how many holds a block has now.

    Attributes:
        expected: per block, how many promised requests will drop it as their windows move.
        num_blocks: blocks kept back.
    """

    def __init__(self, num_holds: Callable[[int], int]) -> None:
        self.expected: dict[int, int] = {}
        self.num_blocks = 0
        self._num_holds = num_holds
        self._kept: dict[int, int] = {}

    def expect_back(self, block_ids: Iterable[int], delta: int) -> None:
        """Note that ``delta`` more promised requests will drop these blocks as windows move."""
        for block in block_ids:
            count = self.expected.get(block, 0) + delta
            if count:
                self.expected[block] = count
            else:
                self.expected.pop(block, None)
            self._set(block)

    def holds_changed(self, block_ids: Iterable[int]) -> None:
        """Count anew for those of these blocks that are expected back."""
        for block in self.expected.keys() & block_ids:
            self._set(block)

    def _set(self, block: int) -> None:
        new = max(0, min(self.expected.get(block, 0), self._num_holds(block) - 1))
        self.num_blocks += new - self._kept.get(block, 0)
        if new:
            self._kept[block] = new
        else:
            self._kept.pop(block, None)

    def growth(self, block_ids: Iterable[int], extra_expected: int = 0) -> int:
        """How much ``num_blocks`` grows if each block gets one hold (and is expected back)."""
        grown = 0
        for block in block_ids:
            expected = self.expected.get(block, 0) + extra_expected
            grown += min(expected, self._num_holds(block)) - self._kept.get(block, 0)
        return grown

    def check(self) -> None:
        """Verify what is kept back against the holds; raises InvariantViolation."""
        kept = {
            block: slack
            for block, count in self.expected.items()
            if (slack := min(count, self._num_holds(block) - 1)) > 0
        }
        if kept != self._kept or sum(kept.values()) != self.num_blocks:
            raise InvariantViolation("slack is not what the shared blocks require")
