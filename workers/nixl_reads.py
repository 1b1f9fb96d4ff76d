"""Peers and reads of the NIXL transport: what its thread posts, polls and reports."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from disagg.errors import RemoteFault
from disagg.wire.stream_hello import PoolInfo
from disagg.workers.nixl_agent import NixlAgent, PreparedPool, ReadHandle
from disagg.workers.peer_reads import MEND_DELAY_MIN_S, Peer, Posted, Read

_log = logging.getLogger(__name__)


class NixlReads:
    """Every peer and every read that has not ended; used on the transport's thread alone.

    Args:
        agent: posts, polls and releases handles.
        name: of this worker's agent.
        on_ended: called once for each read, when all its handles are terminal.

    Attributes:
        num_bytes: moved by the handles in progress; other threads may look at it.
        oldest_s: when the oldest handle in progress was posted; other threads may look at it.
    """

    def __init__(self, agent: NixlAgent, name: str, on_ended: Callable[[Read], None]) -> None:
        self._agent = agent
        self._name = name
        self._on_ended = on_ended
        self._peers: dict[str, Peer] = {}
        self._posted: dict[ReadHandle, Posted] = {}
        self._ended: deque[Read] = deque()
        self._active_s = 0.0
        self._closing = False
        self.num_bytes = 0
        self.oldest_s: float | None = None

    @property
    def num_in_progress(self) -> int:
        """Handles posted and not terminal; other threads may look at it."""
        return len(self._posted)

    @property
    def is_over(self) -> bool:
        """Whether the reads are closed and no handle is in progress."""
        return self._closing and not self._posted

    @property
    def _can_post(self) -> bool:
        return any(peer.can_post for peer in self._peers.values())

    def add_peer(self, name: str, info: PoolInfo, in_parts: bool = False) -> None:
        """Connect to a peer; one that announced another pool in the same epoch keeps its first.

        ``in_parts``: its blocks are not like ours, and only ranges of bytes are read.
        """
        peer = self._peers.get(name)
        if peer is not None and peer.removing:
            peer.again = info
        elif peer is None or peer.pool is None:
            self._connect(name, info, in_parts)
        elif peer.info != info:
            _log.error("peer %s announced another pool in the same epoch; ignored", name)

    def remove_peer(self, name: str) -> None:
        """Fail what is not posted to a peer; forget it when nothing is in progress."""
        peer = self._peers.get(name)
        if peer is None:
            return
        peer.removing = True
        peer.again = None
        self._fail_waiting(peer, f"peer {name} was removed")
        self._forget_when_idle(peer)

    def start(self, read: Read) -> None:
        """Queue a read, or end it at once with the error that forbids it."""
        peer = self._peers.get(name := read.peer)
        if peer is not None and peer.pool is None and peer.mend(time.monotonic()):
            self._forget_when_idle(peer)
            peer = self._peers[name]
        if read.error:
            pass
        elif self._closing:
            read.error = "the transport is closing"
        elif peer is None or (peer.removing and peer.again is None):
            read.error = f"peer {name} is unknown"
        elif peer.error:
            read.error = peer.error
        elif not read.is_inside(peer.again or peer.info):
            read.error = f"a source block lies outside the pool of {name}"
        if read.error or not read.src.size or peer is None:
            self._report(read)
        else:
            peer.waiting.append(read)

    def check(self) -> None:
        """Have the agent READ from itself; raises, where no peer can be at fault."""
        if not self._closing:
            self._agent.check()

    def close(self) -> None:
        """Fail what is not posted; nothing is read any more."""
        self._closing = True
        for peer in list(self._peers.values()):
            self._fail_waiting(peer, "the transport is closing")

    def advance(self) -> None:
        """Post what has its turn, look at what is in progress, report what ended."""
        progress = self._post_pieces() | self._poll()
        if not self._can_post:
            self.report_ended()
        if progress:
            self._active_s = time.monotonic()

    def wait_s(self) -> float | None:
        """How long to wait for a command before the next `advance`; None: until there is one."""
        if self._can_post:
            return 0.0
        if not self._posted:
            return None
        # At least 50 us; 1 % of the silence so far, so that a stopped peer costs no core.
        silent_s = time.monotonic() - self._active_s
        return min(max(silent_s / 100, 50e-6), 5e-3)

    def report_ended(self) -> None:
        """Report the reads that have ended, each once."""
        while self._ended:
            self._on_ended(self._ended.popleft())

    # -- inside -------------------------------------------------------------------------------

    def _connect(self, name: str, info: PoolInfo, in_parts: bool) -> Peer:
        peer = self._peers[name] = Peer(name, info, in_parts)
        ours = self._agent.info
        if name == self._name:
            peer.error = "a worker does not read from itself"
        elif info.block_bytes != ours.block_bytes and not in_parts:
            peer.error = f"{name} has blocks of {info.block_bytes} bytes, not {ours.block_bytes}"
        else:
            try:
                peer.pool = self._agent.add_peer(name, info)
            except RemoteFault as error:
                peer.error = error.message
        if peer.error:
            _log.warning("no KV reads from %s: %s", name, peer.error)
        return peer

    def _fail_waiting(self, peer: Peer, error: str) -> None:
        for read in list(peer.waiting):
            self._end_piece(peer, read, error)

    def _forget_when_idle(self, peer: Peer) -> None:
        if not peer.removing or peer.num_handles:
            return
        name = peer.name
        del self._peers[name]
        if peer.pool is not None:
            try:
                self._agent.remove_peer(name, peer.pool)
            except RemoteFault as error:
                _log.warning("%s", error.message)
        if peer.again is not None:
            fresh = self._connect(name, peer.again, peer.in_parts)
            fresh.waiting = peer.waiting
            fresh.mend_after_s, fresh.mend_delay_s = peer.mend_after_s, peer.mend_delay_s
            if fresh.error:
                self._fail_waiting(fresh, fresh.error)

    def _post_pieces(self) -> bool:
        """Post one handle to each peer that has a turn; whether there was one."""
        posted = False
        for peer in list(self._peers.values()):
            if not peer.can_post or peer.pool is None:
                continue
            posted = True
            read = peer.waiting[0]
            piece = read.next_piece
            num_bytes = read.bytes_of(piece, peer.info.block_bytes)
            try:
                handle = self._make(peer, peer.pool, read, piece)
            except RemoteFault as error:
                self._end_piece(peer, read, error.message)
                continue
            read.num_posted = piece.stop
            if read.is_posted:
                peer.waiting.popleft()
            read.num_handles += 1
            peer.num_handles += 1
            peer.num_bytes += num_bytes
            self._posted[handle] = Posted(peer, read, num_bytes, time.monotonic())
            self._note_progress()
            if any(one.peer != peer.name or one.is_late for one in self._ended):
                self.report_ended()  # only now: who is woken runs while this is inside NIXL
            self._settle(handle, self._agent.post)
        return posted

    def _make(self, peer: Peer, pool: PreparedPool, read: Read, piece: slice) -> ReadHandle:
        if read.lengths is None:
            return self._agent.make_read(pool, read.src[piece], read.dst[piece])
        ranges = read.src[piece], read.dst[piece], read.lengths[piece]
        return self._agent.make_range_read(peer.name, peer.info, *ranges)

    def _poll(self) -> bool:
        """Look at every handle in progress; whether one became terminal."""
        before = len(self._posted)
        for handle in list(self._posted):
            self._settle(handle, self._agent.is_done)
        self._note_progress()
        return len(self._posted) < before

    def _note_progress(self) -> None:
        # Published by the thread: others cannot walk a dict that changes.
        self.num_bytes = sum(posted.num_bytes for posted in self._posted.values())
        self.oldest_s = next((posted.posted_s for posted in self._posted.values()), None)

    def _settle(self, handle: ReadHandle, is_done: Callable[[ReadHandle], bool]) -> None:
        error = ""
        try:
            if not is_done(handle):
                return
        except RemoteFault as fault:
            error = fault.message
        posted = self._posted.pop(handle)
        if not error:
            posted.peer.ended(time.monotonic() - posted.posted_s)
        posted.read.num_handles -= 1
        posted.peer.num_handles -= 1
        posted.peer.num_bytes -= posted.num_bytes
        with contextlib.suppress(RemoteFault):  # of a failed READ
            self._agent.release(handle)
        self._end_piece(posted.peer, posted.read, error)
        if error:  # NIXL never mends a broken connection: every later READ would fail as well
            posted.peer.mend(time.monotonic())
        else:
            posted.peer.mend_delay_s = MEND_DELAY_MIN_S
        self._forget_when_idle(posted.peer)

    def _end_piece(self, peer: Peer, read: Read, error: str) -> None:
        """Note a failure, which ends what is not posted; report when nothing is in progress."""
        read.error = read.error or error
        if read.error and not read.is_posted:
            read.num_posted = len(read.src)
            peer.waiting.remove(read)
        if not read.num_handles and read.is_posted:
            self._report(read)

    def _report(self, read: Read) -> None:
        read.ended_s = time.monotonic()
        siblings = read.siblings
        if siblings is None:
            self._ended.append(read)
        else:
            siblings.num_left -= 1
            siblings.error = siblings.error or read.error
            if not siblings.num_left:  # the last one stands for all
                self._ended.append(read)
                read.error = siblings.error
        if read.error:
            self.check()  # the peer's fault, or ours?
