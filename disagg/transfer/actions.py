"""What the transfer tables want done: the caller sends, posts and tells."""

from dataclasses import dataclass
from enum import StrEnum

from disagg.messages.identity import Incarnation, Question, RequestKey
from disagg.messages.peer import PeerMessage, Seal


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a worker; it may be lost."""

    to: Incarnation
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class PostRead:
    """Post one READ of whole blocks; report its end by ``on_read_done``, once for all ranks.

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


@dataclass(frozen=True, slots=True)
class LeaseCommitted:
    """The reader has all bytes and the lease's hold was dropped."""

    key: RequestKey
    lease_id: int
    pull: Question | None = None
    """Of a prefix pull; None for a hand-over."""


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease died before its commit; its hold was dropped."""

    key: RequestKey
    lease_id: int
    reason: str
    pull: Question | None = None


@dataclass(frozen=True, slots=True)
class InboundStats:
    """What a committed transfer cost."""

    num_reads: int
    num_blocks: tuple[int, ...]
    """Pulled, per group."""
    read_ms: int
    """From the first READ posted to the last one done; 0 without READs."""
    exposed_ms: int
    """From the seal's arrival to the commit's OK."""


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
    """(group, position) of every block that did not arrive."""
    message: str
    """Names them as well."""
    stats: InboundStats


class InboundFailure(StrEnum):
    """Why an inbound transfer failed."""

    LEASE_DEAD = "lease_dead"
    COMMIT_REFUSED = "commit_refused"
    READ_FAILED = "read_failed"
    """A READ ended with an error, or the owner offered what the protocol forbids."""
    READ_STUCK = "read_stuck"
    PEER_LOST = "peer_lost"
    PEER_ENDED = "peer_ended"


READ_FAULTS = frozenset({InboundFailure.READ_FAILED, InboundFailure.READ_STUCK})
"""Reader or owner may be at fault: each looks at its own transport."""


@dataclass(frozen=True, slots=True)
class InboundFailed:
    """The bytes are not to be read. Destinations stay held until `InboundDrained`."""

    key: RequestKey
    reason: InboundFailure
    message: str
    group: int = -1
    """Group and position of the block at fault, -1 where it is not one block's fault."""
    position: int = -1


@dataclass(frozen=True, slots=True)
class InboundDrained:
    """No READ of a failed or aborted transfer is in progress; its hold was dropped."""

    key: RequestKey
    num_blocks: int


LeaseAction = Send | LeaseCommitted | LeaseEnded
InboundAction = Send | PostRead | InboundCommitted | InboundPartial | InboundFailed | InboundDrained
