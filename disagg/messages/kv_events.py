"""What entered and left a worker's prefix cache and its tiers: worker to router."""

from dataclasses import dataclass, field


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


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """Everything findable now; ``hashes[group]``; go on with events from ``next_seq``."""

    next_seq: int
    hashes: tuple[tuple[bytes, ...], ...]
    tiers: tuple[TierStored, ...] = ()
    """What tiers have, at most once per tier and group."""
