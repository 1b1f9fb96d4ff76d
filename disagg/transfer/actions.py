"""What the transfer tables exchange with those who use them.

A table puts the commands it wants carried out into an `Outbox`, and gives news to the listener of
the entry it is about.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from disagg.messages.identity import Incarnation, LeaseRequest, RequestKey
from disagg.messages.peer import Offers, PeerMessage, Seal

# -- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a worker; it may be lost."""

    to: Incarnation
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class PostRead:
    """Post one READ of blocks; report its end by ``on_read_done``, once for all ranks.

    The destinations are held until then, so the end must be reported exactly when every handle
    is terminal (done or exception), whatever became of the request.
    """

    read_id: int
    key: RequestKey
    owner: Incarnation
    src_blocks: tuple[int, ...]
    """Block ids in the owner's pool."""
    dst_blocks: tuple[int, ...]
    """Block ids in our pool, parallel to ``src_blocks``."""
    parts: tuple[tuple[int, int], ...] = ()
    """Group, and which part of the blocks (`GroupReads.pairs`), parallel to them too; () where
    whole blocks are read."""


@dataclass(frozen=True, slots=True)
class ComputeChecksums:
    """Compute a checksum of each of some blocks of our pool; `Checksums.on_computed` follows, once.

    Requests may be carried out in any order, and beside everything else.
    """

    request_id: int
    blocks: tuple[int, ...]
    """Block ids; of several ranks, each one's part of the block enters its checksum."""


Command = Send | PostRead | ComputeChecksums


class Outbox(Protocol):
    """Takes commands, to be carried out in their order."""

    def add(self, command: Command, /) -> None:
        """Append a command."""


class BlockHolds(Protocol):
    """A block pool's named holders; a block is free only when nobody holds it."""

    def hold(self, holder: Hashable, block_ids: Sequence[int]) -> None:
        """Add one hold per block for a new holder."""

    def add_to_hold(self, holder: Hashable, block_ids: Sequence[int]) -> None:
        """Add one hold per block for an existing holder."""

    def drop(self, holder: Hashable) -> int:
        """End all holds of a holder; returns how many blocks became free."""


# -- news of a lease, at its owner ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseCommitted:
    """The reader has all bytes and the lease's hold was dropped."""

    key: RequestKey
    lease_id: int
    pull: LeaseRequest | None = None
    """Of a prefix pull; None for a hand-over."""


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease died before its commit; its hold was dropped."""

    key: RequestKey
    lease_id: int
    reason: str
    pull: LeaseRequest | None = None


class LeaseListener(Protocol):
    """Gets the news of the leases that it opened."""

    def lease_committed(self, event: LeaseCommitted) -> None:
        """The reader needs the lease no more."""

    def lease_ended(self, event: LeaseEnded) -> None:
        """The lease is dead; the message to its reader follows."""


# -- news of a request for a lease, at the reader ---------------------------------------------


class LeaseRequester(Protocol):
    """Gets the answers to the leases that it requested."""

    def lease_granted(self, now_ms: int, owner: Incarnation, offers: Offers) -> None:
        """The lease is there: begin the inbound transfer, or give the request up."""

    def lease_refused(self, now_ms: int, key: RequestKey, cause: str, message: str) -> None:
        """There is no lease, or none in time; the request is forgotten."""


# -- news of an inbound transfer --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InboundStats:
    """Figures of a committed transfer: what it moved and how long it took."""

    num_reads: int
    num_blocks: tuple[int, ...]
    """Pulled, per group."""
    read_ms: int
    """From the first READ posted to the last one done; 0 without READs."""
    num_bursts: int
    """Times at which READs were posted while none was in progress: more than one where blocks are
    read while others are computed."""
    reading_ms: int
    """While READs were in progress, of all bursts together."""
    exposed_ms: int
    """From the seal's arrival to the owner's confirmation of the commit."""


@dataclass(frozen=True, slots=True)
class InboundCommitted:
    """The bytes are right. Make the blocks readable, then call ``finish(key)``."""

    key: RequestKey
    seal: Seal
    stats: InboundStats


@dataclass(frozen=True, slots=True)
class InboundPartial:
    """The owner held everything, but READs had errors: only the other blocks' bytes are right.

    Make those findable, then call ``finish(key)``; the transfer as a whole has failed.
    """

    key: RequestKey
    failed: tuple[tuple[int, int], ...]
    """(group, block index) of every block that did not arrive."""
    message: str
    """Names them as well."""
    stats: InboundStats


class InboundFailure(StrEnum):
    """The reasons for which an inbound transfer fails."""

    LEASE_DEAD = "lease_dead"
    COMMIT_REFUSED = "commit_refused"
    READ_FAILED = "read_failed"
    """A READ ended with an error, or the owner offered what the protocol forbids."""
    READ_STUCK = "read_stuck"
    PEER_LOST = "peer_lost"


READ_FAULTS = frozenset({InboundFailure.READ_FAILED, InboundFailure.READ_STUCK})
"""Reader or owner may be at fault: each looks at its own transport."""


@dataclass(frozen=True, slots=True)
class InboundFailed:
    """The bytes are not to be read. Destinations stay held until `InboundDrained`."""

    key: RequestKey
    reason: InboundFailure
    message: str
    block: tuple[int, int] | None = None
    """(group, block index) of the block at fault; None where it is not one block's fault."""


@dataclass(frozen=True, slots=True)
class InboundDrained:
    """No READ of a failed or aborted transfer is in progress; its hold was dropped."""

    key: RequestKey
    num_blocks: int


class InboundListener(Protocol):
    """Gets the news of the inbound transfers that it began."""

    def progressed(self, now_ms: int, key: RequestKey) -> None:
        """Something new was offered or read: the transfer does not stand still."""

    def committed(self, now_ms: int, event: InboundCommitted) -> None:
        """The owner confirmed the whole transfer."""

    def partly_committed(self, now_ms: int, event: InboundPartial) -> None:
        """The owner confirmed all blocks but those whose READs had errors."""

    def failed(self, now_ms: int, event: InboundFailed) -> None:
        """The transfer is over without a commit."""

    def drained(self, event: InboundDrained) -> None:
        """The destinations of a transfer that failed or was aborted are no longer held."""
