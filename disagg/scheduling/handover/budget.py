"""How much of a pool hand-overs may take together, checked when it is taken."""

from collections.abc import Hashable


class HandoverBudget:
    """Blocks of reservations, of leases and of prefills that will be handed over.

    Counted per generation, or per request of a prefix pull. The bound keeps two workers that
    prefill for each other out of a deadlock.
    """

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._taken: dict[Hashable, int] = {}
        self.num_blocks = 0

    def take(self, key: Hashable, num_blocks: int) -> bool:
        """Count ``num_blocks`` for a holder in place of what it had; False if too much."""
        had = self._taken.get(key, 0)
        if self.num_blocks - had + num_blocks > self.blocks_max:
            return False
        self._taken[key] = num_blocks
        self.num_blocks += num_blocks - had
        return True

    def give_back(self, key: Hashable) -> None:
        """Count nothing for a holder any more; idempotent."""
        self.num_blocks -= self._taken.pop(key, 0)
