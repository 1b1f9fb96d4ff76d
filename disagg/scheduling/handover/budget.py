"""How much of a pool hand-overs may take together, checked when it is taken."""

from collections.abc import Hashable, Mapping


class HandoverBudget:
    """Blocks of reservations, of leases and of prefills that will be handed over.

    Counted per generation, or per request of a prefix pull: what each really holds, over all
    groups. The bound leaves memory to decodes. One holder that alone exceeds it is allowed beside
    the others and not counted among them, so that long and short prompts never wait for each
    other's share; a bound of 0 allows nobody.
    """

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._taken: dict[Hashable, int] = {}

    def take(self, key: Hashable, num_blocks: int) -> bool:
        """Count ``num_blocks`` for a holder in place of what it had; False if too much."""
        taken = self._taken | {key: num_blocks}
        if not self.blocks_max or self._exceeds(taken):
            return False
        self._taken = taken
        return True

    @property
    def num_blocks(self) -> int:
        """Blocks of all holders."""
        return sum(self._taken.values())

    @property
    def exceeded(self) -> bool:
        """Whether two holders exceed the bound, each alone, or the others do together."""
        return self._exceeds(self._taken)

    def give_back(self, key: Hashable) -> None:
        """Count nothing for a holder any more; idempotent."""
        self._taken.pop(key, None)

    def _exceeds(self, taken: Mapping[Hashable, int]) -> bool:
        within = [num for num in taken.values() if num <= self.blocks_max]
        return sum(within) > self.blocks_max or len(taken) - len(within) > 1
