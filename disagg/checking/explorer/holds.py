"""A block pool reduced to its named holders, for tables that are looked at by themselves."""

from collections.abc import Hashable, Sequence


class Holds:
    """A block pool reduced to its named holders."""

    def __init__(self) -> None:
        self.blocks: dict[Hashable, tuple[int, ...]] = {}

    def hold(self, holder: Hashable, block_ids: Sequence[int]) -> None:
        """Add one hold per block for a new holder."""
        self.blocks[holder] = tuple(block_ids)

    def add_to_hold(self, holder: Hashable, block_ids: Sequence[int]) -> None:
        """Add one hold per block for an existing holder."""
        self.blocks[holder] += tuple(block_ids)

    def drop(self, holder: Hashable) -> int:
        """End all holds of a holder."""
        return len(self.blocks.pop(holder, ()))

    def held(self) -> set[int]:
        """Blocks with a holder."""
        return {block for blocks in self.blocks.values() for block in blocks}
