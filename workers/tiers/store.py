"""What a store on disk or behind a URL can be asked, by its tier and by ``disagg cache``."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from disagg.workers.tiers.stored_block import StoredBlock


class Store(Protocol):
    """All blocks at one place, of every contract. Raises ConfigError where the store fails."""

    place: str
    """A directory or a URL."""

    def blocks(self) -> Iterator[StoredBlock]:
        """Everything it lists, in no order; what has no name of ours is left out."""
        ...

    def contract(self, contract_name: str) -> str:
        """What a contract is, as JSON; "" if the store does not say."""
        ...

    def load(self, block: StoredBlock) -> bytes:
        """Header and bytes of a block; b"" if it is gone by now."""
        ...

    def remove(self, blocks: Sequence[StoredBlock]) -> int:
        """Delete blocks; returns how many are gone now."""
        ...

    def close(self) -> None:
        """End it."""
        ...
