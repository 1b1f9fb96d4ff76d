"""What the NIXL transport keeps of a peer and of the reads from it."""

import time
from collections import deque
from dataclasses import dataclass, field

from disagg.wire.stream_hello import PoolInfo
from disagg.workers.nixl_agent import BlockIds, PreparedPool
from disagg.workers.part_reads import Bytes

PEER_HANDLES_MAX = 16
"""In progress per peer, so that one that stopped does not take the others' turns."""
PEER_BYTES_MAX = 64 << 20
"""In progress per peer, so that what was given up drains soon; one handle may always be."""
PEER_BYTES_MIN = 1 << 20
"""Likewise, on the slowest link, and at first: how fast it is nobody knows yet."""
HANDLE_S = 1.0
"""A handle that takes longer shares a slow link with too many: UCX carries all of them at once, so
that the first ends when nearly all do. Of four times 16 MiB at 40 Mbit/s it did so after 14 s, and
a living link passed for a stuck one (``transfer.read_stuck_ms``)."""
REPORT_LATER_S = 0.005
"""Ends are reported so much later while more is read from the same peer: a report hands the
interpreter over. The next post to another peer may block."""
MEND_DELAY_MIN_S = 1.0
MEND_DELAY_MAX_S = 60.0


@dataclass(slots=True)
class Siblings:
    """Reads from several ranks of one peer that are one read to who asked for it."""

    num_left: int
    error: str = ""


@dataclass(slots=True, eq=False)
class Read:
    """One read: cut into pieces, each of which becomes a handle."""

    read_id: int
    peer: str
    src: BlockIds
    """Block ids; offsets in bytes where parts of blocks are read."""
    dst: BlockIds
    piece_blocks: int
    """Blocks of each handle, or ranges; the last one's may be fewer."""
    lengths: Bytes | None = None
    """Of ranges, in bytes; None where whole blocks are read."""
    siblings: Siblings | None = None
    num_posted: int = 0
    """Blocks that are in handles, or never will be because the read failed."""
    num_handles: int = 0
    """In progress."""
    error: str = ""
    ended_s: float = 0.0

    @property
    def is_late(self) -> bool:
        """Whether its end should be reported whatever else is read."""
        return time.monotonic() > self.ended_s + REPORT_LATER_S

    @property
    def is_posted(self) -> bool:
        """Whether no more handles will follow."""
        return self.num_posted == len(self.src)

    @property
    def next_piece(self) -> slice:
        """The blocks of the next handle."""
        return slice(self.num_posted, min(self.num_posted + self.piece_blocks, len(self.src)))

    def bytes_of(self, piece: slice, block_bytes: int) -> int:
        """Bytes that the handle of a piece moves."""
        if self.lengths is not None:
            return int(self.lengths[piece].sum())
        return int(piece.stop - piece.start) * block_bytes

    def is_inside(self, info: PoolInfo) -> bool:
        """Whether a peer's pool has all that is read."""
        if self.lengths is None:
            return are_inside(self.src, info.num_blocks)
        end = info.num_blocks * info.block_bytes
        return not self.src.size or (
            int(self.src.min()) >= 0 and int((self.src + self.lengths).max()) <= end
        )


@dataclass(slots=True, eq=False)
class Peer:
    """One agent we read from; ``pool`` is None where it could not be added, for ``error``."""

    name: str
    info: PoolInfo
    in_parts: bool = False
    """Its blocks are not like ours."""
    pool: PreparedPool | None = None
    error: str = ""
    waiting: deque[Read] = field(default_factory=deque)
    """Reads with pieces to post; the first has its turn."""
    num_handles: int = 0
    """In progress."""
    num_bytes: int = 0
    """In progress."""
    bytes_max: int = PEER_BYTES_MIN
    """In progress at most, or one handle: what moves in `HANDLE_S`, within the bounds above."""
    removing: bool = False
    """It is forgotten when nothing is in progress any more."""
    again: PoolInfo | None = None
    """With which it is then added anew."""
    mend_after_s: float = 0.0
    """Not before is a broken connection made anew: each try that fails costs UCX a descriptor."""
    mend_delay_s: float = MEND_DELAY_MIN_S

    @property
    def can_post(self) -> bool:
        """Whether a piece can be posted now."""
        if not self.waiting or self.pool is None or self.removing:
            return False
        if not self.num_handles:
            return True
        read = self.waiting[0]
        num_bytes = self.num_bytes + read.bytes_of(read.next_piece, self.info.block_bytes)
        return self.num_handles < PEER_HANDLES_MAX and num_bytes <= self.bytes_max

    def ended(self, took_s: float) -> None:
        """Let more be in progress, or less: a handle has ended well, among what still counts."""
        grown = 2 * self.bytes_max if took_s <= HANDLE_S else self.num_bytes * HANDLE_S / took_s
        self.bytes_max = max(PEER_BYTES_MIN, min(int(grown), PEER_BYTES_MAX))

    def mend(self, now_s: float) -> bool:
        """Mark the peer to be added anew, if it is time; each time the delay doubles."""
        if self.removing or now_s < self.mend_after_s:
            return False
        self.removing, self.again = True, self.info
        self.mend_after_s = now_s + self.mend_delay_s
        self.mend_delay_s = min(2 * self.mend_delay_s, MEND_DELAY_MAX_S)
        return True


@dataclass(slots=True, eq=False)
class Posted:
    """A handle in progress, with its peer and its read."""

    peer: Peer
    read: Read
    num_bytes: int
    posted_s: float


def are_inside(blocks: BlockIds, num_blocks: int) -> bool:
    """Whether a pool of so many blocks has all of these."""
    return not blocks.size or (int(blocks.min()) >= 0 and int(blocks.max()) < num_blocks)
