"""What each tier of this worker is believed to have. It may be wrong: that costs time only."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from disagg.messages.kv_events import KVEvent, TierCleared, TierRemoved, TierStored
from disagg.scheduling.actions import TierKey

TOLD_MAX = 100_000
"""Blocks of a tier that a router is told of at once, the newest: 3 MiB. What a prompt can use of
the others its worker finds out by itself."""
WritePolicy = Literal["publish", "eviction", "reuse"]


@dataclass(frozen=True, slots=True)
class TierSetting:
    """One tier as the core knows it; their order is that in which they are asked.

    Attributes:
        name: as in its setting.
        write: when blocks are written to it: once they can be found (``publish``), before the pool
            gives them up (``eviction``), or once a second prompt has them (``reuse``).
        blocks_max: most blocks that it keeps.
        slow_ms: nobody waits longer for it while nothing comes.
        known: what it has at the start, the least recently used first.
    """

    name: str
    write: WritePolicy
    blocks_max: int
    slow_ms: int = 2_000
    known: Sequence[TierKey] = ()


def _nobody(event: KVEvent) -> None:
    """Nobody is told."""


class TierIndex:
    """Keys of the blocks in each tier; ``emit`` takes what changes, for routers.

    Fed by what tiers have at the start, by what was written, and by what could not be read. A store
    that others share may lose more than it says: so no more keys are kept than it has room for.

    Attributes:
        silent: tiers, by number, that are neither read nor written now.
        closed: the same for tiers that are being emptied.
    """

    def __init__(
        self, tiers: Sequence[TierSetting], emit: Callable[[KVEvent], None] = _nobody
    ) -> None:
        self._tiers = tiers
        self._emit = emit
        self._keys: list[dict[TierKey, None]] = [{} for _ in tiers]
        self.silent: set[int] = set()
        self.closed: set[int] = set()
        for number, tier in enumerate(tiers):
            self.add(number, tier.known)

    def find(self, key: TierKey) -> int | None:
        """Number of the first tier that has a block and answers."""
        for number, keys in enumerate(self._keys):
            if key in keys and self.is_open(number):
                return number
        return None

    def is_open(self, tier: int) -> bool:
        """Whether a tier may be read and written."""
        return tier not in self.silent and tier not in self.closed

    def close(self, tier: int) -> None:
        """A tier is to be emptied: nothing of it is known any more."""
        self._keys[tier].clear()
        self.closed.add(tier)
        self._emit(TierCleared(tier))

    def has(self, tier: int, key: TierKey) -> bool:
        """Whether one tier has a block."""
        return key in self._keys[tier]

    def num_keys(self, tier: int) -> int:
        """How many blocks a tier is believed to have."""
        return len(self._keys[tier])

    def add(self, tier: int, keys: Iterable[TierKey]) -> None:
        """A tier has these blocks now; the oldest go where there are more than fit."""
        known, new = self._keys[tier], dict[TierKey, None]()
        for key in keys:
            if key in known:
                del known[key]
            else:
                new[key] = None
            known[key] = None
        lost = list(islice(known, max(0, len(known) - self._tiers[tier].blocks_max)))
        for key in lost:
            del known[key]
            if key in new:
                del new[key]
        self._tell(TierRemoved, tier, lost)  # first: a router keeps no more than fit, either
        self._tell(TierStored, tier, islice(new, max(0, len(new) - TOLD_MAX), None))

    def stored(self) -> tuple[TierStored, ...]:
        """What tiers have, for routers: of each the newest `TOLD_MAX` blocks."""
        return tuple(
            TierStored(tier, group, tuple(values))
            for tier, keys in enumerate(self._keys)
            for group, values in _by_group(islice(keys, max(0, len(keys) - TOLD_MAX), None)).items()
        )

    def remove(self, tier: int, keys: Iterable[TierKey]) -> None:
        """A tier has these blocks no more."""
        known = self._keys[tier]
        gone = [key for key in keys if known.pop(key, key) is None]
        self._tell(TierRemoved, tier, gone)

    def _tell(
        self, kind: type[TierStored | TierRemoved], tier: int, keys: Iterable[TierKey]
    ) -> None:
        for group, values in _by_group(keys).items():
            self._emit(kind(tier, group, tuple(values)))


def _by_group(keys: Iterable[TierKey]) -> dict[int, list[bytes]]:
    groups: dict[int, list[bytes]] = {}
    for group, value in keys:
        groups.setdefault(group, []).append(value)
    return groups
