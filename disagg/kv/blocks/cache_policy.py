"""What the prefix cache keeps, and what it gives up first."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from disagg.errors import ConfigError
from disagg.kv.blocks.free_blocks import CachedBlocks
from disagg.kv.blocks.retention import Retention
from disagg.kv.blocks.segmented_lru import SegmentedBlocks


class EvictionOrder(Protocol):
    """Free blocks with a cached content, in the order in which they are evicted."""

    def __len__(self) -> int: ...
    def __contains__(self, block: object) -> bool: ...
    def __iter__(self) -> Iterator[int]: ...

    def has_all(self, block_ids: Sequence[int]) -> bool:
        """Whether all of these blocks are among them."""

    def num_among(self, block_ids: Iterable[int]) -> int:
        """How many of these different blocks are among them."""

    def add(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """Take blocks back, the one to be kept longest last; raises InvariantViolation.

        With ``evict_first`` they are the next ones, the first of them first.
        """

    def oldest(self, num_blocks: int) -> list[int]:
        """Those that ``take`` would remove now, as far as there are so many; nothing changes."""

    def remove(self, block_ids: Sequence[int]) -> None:
        """Remove blocks, which are held again."""

    def take(self, num_blocks: int) -> list[int]:
        """Remove and return the first ones; the caller checked the length."""

    def found(self, block_ids: Sequence[int]) -> None:
        """Note that a request found the content of these blocks, held or free."""

    def gone(self, block_ids: Iterable[int]) -> None:
        """Note that these blocks have lost their content."""

    def clear(self) -> None:
        """Forget all free blocks and what was noted."""

    def check(self) -> None:
        """Verify the order; raises InvariantViolation."""


EVICTIONS: Mapping[str, Callable[[Sized], EvictionOrder]] = MappingProxyType(
    {"lru": lambda _: CachedBlocks(), "segmented_lru": SegmentedBlocks}
)
"""By name, made from the free blocks without a content: the least recently freed go first; or those
go first that nobody has found yet."""


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """What of the finished blocks can be found, and for how long.

    Attributes:
        enabled: finished blocks can be found; else every prompt is computed from its start.
        retention: what stays findable after it has left a window.
        deduplicate: keep a finished block private if its content is cached already.
        eviction: name of the order in which free cached blocks are given up, see `EVICTIONS`.
        observe_every: the times of every so manieth block are observed; 0: of none.
    """

    enabled: bool = True
    retention: Retention = field(default_factory=Retention)
    deduplicate: bool = True
    eviction: str = "lru"
    observe_every: int = 0

    def __post_init__(self) -> None:
        if self.eviction not in EVICTIONS:
            known = ", ".join(EVICTIONS)
            raise ConfigError(f"{self.eviction!r} is not known; known: {known}", param="eviction")

    def eviction_order(self, uncached: Sized) -> EvictionOrder:
        """A new, empty one, beside the free blocks without a content."""
        return EVICTIONS[self.eviction](uncached)
