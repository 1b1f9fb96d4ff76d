"""What a tier must do, and how a kind of tier is opened."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from disagg.scheduling.actions import TierKey
from disagg.workers.tiers.contract import TierContract
from disagg.workers.tiers.options import TierOptions

KEY_BYTES_MAX = 64
"""Of a chain value; those of `disagg.kv.hashing` have 32."""


@dataclass(frozen=True, slots=True)
class Written:
    """What became of blocks that were to be written.

    Attributes:
        stored: the ones the tier has now, in the order given; one that it had before counts.
        evicted: what it gave up for them, as far as it knows: of a shared store others see less.
    """

    stored: tuple[TierKey, ...]
    evicted: tuple[TierKey, ...] = ()


class CopiesBlocks(Protocol):
    """Copies blocks between a worker's pool and its tiers, and reports the end of each copy."""

    def submit_write(self, copy_id: int, tier: str, blocks: Sequence[tuple[TierKey, int]]) -> None:
        """Copy blocks into a tier; `Control.tier_written` follows."""
        ...

    def submit_read(self, copy_id: int, tier: str, blocks: Sequence[tuple[TierKey, int]]) -> None:
        """Copy blocks out of a tier; `Control.tier_read` follows."""
        ...

    def submit_clear(self, tier: str) -> None:
        """Drop all that a tier has; `Control.tier_cleared` follows."""
        ...

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """What happened so far, by tier and name."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Stop, and report nothing from now on; False if a copy is still being carried."""
        ...


class Tier(Protocol):
    """A store of whole blocks of one contract; nothing in it knows of layers.

    Its methods block, and are called from the threads of `TierCopies`, several at once. None of
    them but `clear` raises for what a store does: full, slow, damaged or gone are blocks not stored
    and blocks missed, and are counted. What it says it has is a hint: others may share the store.
    """

    name: str
    """As in its setting; no two tiers of a worker have the same."""
    capacity_bytes: int
    """How many bytes of blocks it keeps at most."""

    def known(self) -> Sequence[TierKey]:
        """What it has of this contract when the worker starts, least recently used first."""
        ...

    def write(self, blocks: Sequence[tuple[TierKey, memoryview]]) -> Written:
        """Store blocks; the views are read until it returns, and not after it."""
        ...

    def read(self, blocks: Sequence[tuple[TierKey, memoryview]]) -> tuple[bool, ...]:
        """Fill each view with its block, as it was written.

        Returns:
            One per block, in order: filled and intact. Where it is False the view holds anything.
        """
        ...

    def forget(self, keys: Sequence[TierKey]) -> None:
        """Drop blocks; those it does not have are no error."""
        ...

    def clear(self) -> None:
        """Drop every block of this contract, whoever wrote it, while nothing else is called.

        Raises:
            Exception: of any kind; some may be left.
        """
        ...

    def counts(self) -> Mapping[str, int]:
        """What happened so far by name, such as ``corrupt`` or ``full``; only ever more."""
        ...

    def close(self) -> None:
        """End it; no other call is in progress or follows."""
        ...


TierFactory = Callable[[TierOptions, TierContract], Tier]
"""How a kind of tier is opened; the entry points of the group ``disagg.tiers`` are of this type.

It raises ConfigError, naming option and reason, for what cannot work, and for a store that is away;
one that fails later is a tier that misses.
"""
