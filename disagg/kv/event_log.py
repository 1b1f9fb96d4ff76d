"""Numbers what enters and leaves the prefix cache, for routers."""

from collections import deque
from collections.abc import Callable
from itertools import islice

from disagg.messages.kv_events import (
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    KVEventBatch,
    KVSnapshot,
    TierStored,
)

WAITING_EVENTS_MAX = 1024
"""More are not kept waiting by who sends them now and then: the log would lose them first."""


class KVEventLog:
    """Numbers events and keeps the newest ``events_max`` of them.

    Args:
        read_hashes: returns per group the hashes findable now (for snapshots).
        num_groups: higher group numbers are not logged: they hold what follows the first block of
            a linear state, and nobody finds that without the first.
        events_max: bound of the buffer; older events are dropped, readers then see a gap.

    Attributes:
        read_tiers: returns what tiers have now (for snapshots).
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
        self.read_tiers: Callable[[], tuple[TierStored, ...]] = tuple

    def append(self, event: KVEvent) -> None:
        """Number and keep one event."""
        if isinstance(event, BlocksStored | BlocksRemoved) and event.group >= self._num_groups:
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
        hashes = self._read_hashes()[: self._num_groups]
        return KVSnapshot(self.next_seq, hashes, self.read_tiers())
