"""What entered and left a worker's prefix cache and its tiers: worker to router."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of one group became findable.

    Attributes:
        group: KV cache group.
        hashes: chain values at the ends of the blocks; the key of a block is (group, value).
        parent_hash: value before the first block, None at the start of a sequence.
        first_position: position of the first token of the first block.
        block_tokens: tokens per block; the event covers exactly
            ``first_position .. first_position + len(hashes) * block_tokens``.
        token_ids: those tokens if the log carries token ids, else empty.
    """

    group: int
    hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    first_position: int
    block_tokens: int
    token_ids: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """The last copy of each of these blocks left the cache."""

    group: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The worker's prefix cache was emptied."""


@dataclass(frozen=True, slots=True)
class TierStored:
    """A tier of the worker has these blocks now.

    Attributes:
        tier: number of the tier, as the worker registered them.
        group: KV cache group.
        hashes: chain values at the ends of the blocks, in no order. Of a linear state of several
            blocks the first one's is the state's, the others' nobody looks for.
    """

    tier: int
    group: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TierRemoved:
    """A tier has these blocks no more."""

    tier: int
    group: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TierCleared:
    """A tier has nothing any more."""

    tier: int


KVEvent = BlocksStored | BlocksRemoved | AllCleared | TierStored | TierRemoved | TierCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """Events ``first_seq .. first_seq + len(events) - 1`` without a gap."""

    first_seq: int
    events: tuple[KVEvent, ...]

    @property
    def next_seq(self) -> int:
        """Number of the next event to request."""
        return self.first_seq + len(self.events)

    def parts(self) -> "Iterator[KVEventBatch]":
        """The same in batches of at most `PART_HASHES_MAX` hashes, or of one event."""
        first, num_hashes = 0, 0
        for number, event in enumerate(self.events):
            num = 0 if isinstance(event, AllCleared | TierCleared) else len(event.hashes)
            if number > first and num_hashes + num > PART_HASHES_MAX:
                yield KVEventBatch(self.first_seq + first, self.events[first:number])
                first, num_hashes = number, 0
            num_hashes += num
        yield KVEventBatch(self.first_seq + first, self.events[first:])


class SnapshotPart(NamedTuple):
    """Which part of a snapshot it is; the first one replaces all that was known before."""

    number: int
    num_parts: int

    @property
    def is_last(self) -> bool:
        """Nothing is missing after it."""
        return self.number == self.num_parts - 1


WHOLE = SnapshotPart(0, 1)
PART_HASHES_MAX = 4096
"""Hashes that are sent at once: who takes them in does nothing else for a millisecond or two."""


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """Everything findable now; ``hashes[group]``; go on with events from ``next_seq``."""

    next_seq: int
    hashes: tuple[tuple[bytes, ...], ...]
    tiers: tuple[TierStored, ...] = ()
    """What tiers have, at most once per tier and group."""
    part: SnapshotPart = WHOLE

    def parts(self) -> "Iterator[KVSnapshot]":
        """The same in parts of at most `PART_HASHES_MAX` hashes, at least one."""
        num_hashes = sum(map(len, self.hashes)) + sum(len(one.hashes) for one in self.tiers)
        if num_hashes <= PART_HASHES_MAX:
            yield self
            return
        none: tuple[tuple[bytes, ...], ...] = ((),) * len(self.hashes)
        pieces: list[tuple[tuple[tuple[bytes, ...], ...], tuple[TierStored, ...]]] = [
            ((*none[:group], some, *none[group + 1 :]), ())
            for group, hashes in enumerate(self.hashes)
            for some in _pieces(hashes)
        ]
        pieces += [
            (none, (TierStored(one.tier, one.group, some),))
            for one in self.tiers
            for some in _pieces(one.hashes)
        ]
        for number, (hashes_of, tiers) in enumerate(pieces):
            yield KVSnapshot(self.next_seq, hashes_of, tiers, SnapshotPart(number, len(pieces)))


def _pieces(hashes: tuple[bytes, ...]) -> Iterator[tuple[bytes, ...]]:
    size = PART_HASHES_MAX
    return (hashes[first : first + size] for first in range(0, len(hashes), size))
