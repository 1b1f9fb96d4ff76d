"""How much of a pool hand-overs may take together, checked when it is taken."""

from disagg.transfer.identity import RequestKey


class HandoverShare:
    """Blocks promised to reservations, outgoing leases and prefills that will be handed over.

    Bounding them is what keeps two workers that prefill for each other out of a deadlock.
    """

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._taken: dict[RequestKey, int] = {}
        self.num_blocks = 0

    def take(self, key: RequestKey, num_blocks: int) -> bool:
        """Count ``num_blocks`` for a generation in place of what it had; False if too much."""
        had = self._taken.get(key, 0)
        if self.num_blocks - had + num_blocks > self.blocks_max:
            return False
        self._taken[key] = num_blocks
        self.num_blocks += num_blocks - had
        return True

    def give_back(self, key: RequestKey) -> None:
        """Nothing is counted for this generation any more; idempotent."""
        self.num_blocks -= self._taken.pop(key, 0)
