"""How much of a pool hand-overs may take together, checked when it is taken."""

from collections.abc import Hashable


class HandoverBudget:
    """Blocks of reservations, of leases and of prefills that will be handed over.

    Counted per generation, or per request of a prefix pull: what each really holds, over all
    groups. The bound leaves memory to decodes. One holder alone may exceed it, so that no prompt
    that fits the pool is kept from being handed over; a bound of 0 allows nobody.
    """

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._taken: dict[Hashable, int] = {}
        self.num_blocks = 0

    def take(self, key: Hashable, num_blocks: int) -> bool:
        """Count ``num_blocks`` for a holder in place of what it had; False if too much."""
        had = self._taken.get(key, 0)
        others = self.num_blocks - had
        if not self.blocks_max or (others and others + num_blocks > self.blocks_max):
            return False
        self._taken[key] = num_blocks
        self.num_blocks += num_blocks - had
        return True

    @property
    def exceeded(self) -> bool:
        """Whether more than one holder take more than the bound together."""
        return self.num_blocks > self.blocks_max and len(self._taken) > 1

    def give_back(self, key: Hashable) -> None:
        """Count nothing for a holder any more; idempotent."""
        self.num_blocks -= self._taken.pop(key, 0)
