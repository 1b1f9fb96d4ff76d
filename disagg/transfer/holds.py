"""What the transfer tables need of a block pool."""

from collections.abc import Hashable, Sequence
from typing import Protocol


class BlockHolds(Protocol):
    """Named holders of blocks; a block is free only when nobody holds it."""

    def hold(self, holder: Hashable, block_ids: Sequence[int]) -> None:
        """Add one hold per block for a new holder."""

    def add_to_hold(self, holder: Hashable, block_ids: Sequence[int]) -> None:
        """Add one hold per block for an existing holder."""

    def drop(self, holder: Hashable) -> int:
        """End all holds of a holder; returns how many blocks became free."""
