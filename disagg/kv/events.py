"""What enters and leaves the prefix cache, numbered, for routers."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice


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
        token_ids: those tokens if the log was asked to carry them, else empty.
    """

    group: int
    hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    first_position: int
    block_tokens: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """The last copy of each of these blocks left the cache."""

    group: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The cache is empty."""


KVEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """Events ``first_seq .. first_seq + len(events) - 1`` without a gap."""

    first_seq: int
    events: tuple[KVEvent, ...]

    @property
    def next_seq(self) -> int:
        """Number to ask for next."""
        return self.first_seq + len(self.events)


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """Everything findable now; ``hashes[group]``; go on with events from ``next_seq``."""

    next_seq: int
    hashes: tuple[tuple[bytes, ...], ...]


class KVEventLog:
    """Numbers events and keeps the newest ``events_max`` of them.

    Args:
        read_hashes: returns per group the hashes findable now (for snapshots).
        num_groups: higher group numbers are not told: they hold what follows the first block of
            a linear state, and nobody finds that without the first.
        events_max: bound of the buffer; older events are dropped, readers then see a gap.
    """

    def __init__(
        self,
        read_hashes: Callable[[], tuple[tuple[bytes, ...], ...]],
        num_groups: int,
        events_max: int = 4096,
    ) -> None:
        self._events: deque[KVEvent] = deque(maxlen=events_max)
        self._read_hashes = read_hashes
        self._num_groups = num_groups
        self.next_seq = 0

    def append(self, event: KVEvent) -> None:
        """Number and keep one event."""
        if not isinstance(event, AllCleared) and event.group >= self._num_groups:
            return
        self._events.append(event)
        self.next_seq += 1

    def since(self, seq: int) -> KVEventBatch | None:
        """Events numbered ``seq`` and later; None if some are gone or never were (snapshot)."""
        first = self.next_seq - len(self._events)
        if not first <= seq <= self.next_seq:
            return None
        return KVEventBatch(seq, tuple(islice(self._events, seq - first, None)))

    def snapshot(self) -> KVSnapshot:
        """The whole cache, consistent with ``next_seq``."""
        return KVSnapshot(self.next_seq, self._read_hashes()[: self._num_groups])
