"""One inbound transfer: what its table remembers of it."""

from collections.abc import Collection
from dataclasses import dataclass, field

from disagg.messages.identity import Attempt, Incarnation, RequestKey
from disagg.messages.peer import AskOffers, Commit, ReadProgress, Seal
from disagg.transfer.actions import InboundCommitted, InboundListener, InboundPartial, InboundStats
from disagg.transfer.reader.offers import OfferList, Run
from disagg.transfer.reader.states import InboundState


@dataclass(frozen=True, slots=True)
class InboundStatus:
    """One inbound transfer, for display."""

    key: RequestKey
    owner: Incarnation
    state: InboundState
    num_blocks: int
    num_reads_in_progress: int


@dataclass(slots=True)
class InboundTransfer:
    """An inbound transfer and its destinations; changed by `InboundTable` only."""

    serial: int
    key: RequestKey
    owner: Incarnation
    offers: OfferList
    listener: InboundListener
    lease_floor: int
    """Leases up to this id are older than this transfer."""
    repeat_ms: int
    """When to send the request for offers, or the Commit, again."""
    state: InboundState = InboundState.RESERVED
    lease_id: int | None = None
    """None until the first Offers."""
    gap_requested: int | None = None
    """Offer number of the gap last requested; requested once, then at the interval."""
    waiting: list[Run] = field(default_factory=list)
    """Offered, but reading from the owner is paused."""
    reads: set[int] = field(default_factory=set)
    """In progress."""
    summing: set[int] = field(default_factory=set)
    """READs that are done, and whose blocks' checksums are being computed."""
    failed: list[tuple[int, int]] = field(default_factory=list)
    """(group, block index) of blocks that did not arrive: of READs that ended with an error, and
    those with another checksum than they were offered with."""
    error: str = ""
    """Why the first of them did not."""
    attempt: Attempt | None = None
    num_computed: int = 0
    """Tokens of the prefill, as far as it is known."""
    num_blocks_read: int = 0
    """Of READs that have ended, parts of blocks counted one by one."""
    progress_sent_ms: int = 0
    """When its owner last got a `ReadProgress`."""
    num_reads: int = 0
    num_bursts: int = 0
    posted_ms: int = 0
    burst_ms: int = 0
    """When the last burst began: READs were posted, and none was in progress."""
    reading_ms: int = 0
    """Of the bursts that have ended."""
    done_ms: int = 0
    sealed_ms: int = 0

    @property
    def holder(self) -> tuple[str, RequestKey, int]:
        """Name of its hold in the block pool."""
        return ("inbound", self.key, self.serial)

    @property
    def num_blocks(self) -> int:
        """Number of destinations held."""
        return sum(self.offers.num_blocks)

    @property
    def num_blocks_arrived(self) -> int:
        """Destinations that what was read fills; whole ones, where they are read in parts."""
        return self.num_blocks_read * self.num_blocks // max(1, self.offers.num_reads)

    @property
    def is_over(self) -> bool:
        """Whether the owner has confirmed and is needed no more."""
        return self.state in (InboundState.VALID, InboundState.PARTIAL)

    @property
    def read_progress(self) -> ReadProgress:
        """How far the READs are, for the owner."""
        assert self.lease_id is not None
        return ReadProgress(self.key, self.lease_id, self.num_blocks_read)

    def status(self) -> InboundStatus:
        """A copy of the transfer's figures, for display."""
        return InboundStatus(self.key, self.owner, self.state, self.num_blocks, len(self.reads))

    def posted(self, now_ms: int, read_ids: Collection[int]) -> None:
        """READs were posted; the first ones, or those after a pause, begin a burst."""
        if not read_ids:
            return
        if not self.num_reads:
            self.posted_ms = now_ms
        if not self.reads:
            self.num_bursts += 1
            self.burst_ms = now_ms
        self.num_reads += len(read_ids)
        self.reads.update(read_ids)

    def read_ended(self, now_ms: int, read_id: int) -> None:
        """A READ is terminal; the last one in progress ends a burst."""
        self.reads.discard(read_id)
        self.done_ms = now_ms
        if not self.reads:
            self.reading_ms += max(0, now_ms - self.burst_ms)

    def report_commit(self, now_ms: int, seal: Seal) -> None:
        """Inform the listener of the commit: what the owner confirmed, and what it cost."""
        stats = InboundStats(
            self.num_reads,
            self.offers.num_blocks,
            max(0, self.done_ms - self.posted_ms),
            self.num_bursts,
            self.reading_ms,
            max(0, now_ms - self.sealed_ms),
        )
        if self.failed:
            failed = tuple(sorted(set(self.failed)))
            partial = InboundPartial(self.key, failed, self.lost, stats)
            self.listener.partly_committed(now_ms, partial)
        else:
            self.listener.committed(now_ms, InboundCommitted(self.key, seal, stats))

    @property
    def lost(self) -> str:
        """Which blocks did not arrive, and why; a few of many."""
        names = [f"{group}:{block_index}" for group, block_index in sorted(set(self.failed))]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        shown = ", ".join(names[:8])
        return f"blocks {shown}{more} (group:block) did not arrive: {self.error}"

    @property
    def repeats(self) -> bool:
        """Whether a message is due at an interval."""
        if self.state is InboundState.READING:
            return not self.offers.all_listed
        return self.state in (InboundState.RESERVED, InboundState.COMMITTING)

    @property
    def repeated(self) -> AskOffers | Commit:
        """The message due at an interval: a request for missing offers, or the commit."""
        if self.attempt is None:
            return AskOffers(self.key, self.lease_id, len(self.offers.ranges))
        assert self.lease_id is not None
        return Commit(self.key, self.lease_id, self.attempt, self.offers.num_ranges)
