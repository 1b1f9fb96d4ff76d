"""KV reads by NIXL, posted and polled on one thread of their own: a post can block for 0.5 s."""

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from disagg.errors import CapacityError, ConfigError, RemoteFault
from disagg.workers.nixl_agent import NixlAgent, ReadHandle
from disagg.workers.peer_reads import MEND_DELAY_MIN_S, Peer, Posted, Read, are_inside
from disagg.workers.pool_region import PoolRegion
from disagg.workers.transport import TransportInfo

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 5.0
READS_MAX = 4096
"""Reads taken and not reported yet; whoever has more asks again later."""


class NixlTransport:
    """See `KVTransport`. Making one takes up to some seconds.

    Args:
        agent_name: ``worker_id:epoch``.
        pool: the own KV memory; it stays registered and alive as long as the process.
        on_read_done: called on the transport's thread with (read id, error or "").
        handle_bytes_max: a read is cut into equal handles of at most this size, 1-16 MiB (of one
            block at least): fewer cost less, larger ones delay what comes after.

    Raises:
        ConfigError: NIXL does not start.
    """

    def __init__(
        self,
        agent_name: str,
        pool: PoolRegion,
        *,
        on_read_done: Callable[[int, str], None],
        handle_bytes_max: int,
    ) -> None:
        self._name = agent_name
        self._on_read_done = on_read_done
        self._handle_blocks_max = max(1, handle_bytes_max // pool.block_bytes)
        # Calls meet the thread here alone; what follows belongs to the thread.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._peers: dict[str, Peer] = {}
        self._posted: dict[ReadHandle, Posted] = {}
        self._ended: deque[Read] = deque()
        self._active_s = 0.0
        self._closing = False
        self._exiting = False
        # Written by the thread, read by all.
        self._failure = ""
        self._ending = threading.Lock()  # no command slips in behind the last one
        self._num_reads = 0  # under that lock
        self._num_bytes = 0
        self._oldest_s: float | None = None
        self._idle: Future[None] = Future()
        started: Future[NixlAgent] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(pool, started), name=f"nixl {agent_name}", daemon=True
        )
        self._thread.start()
        try:
            self._agent = started.result(START_TIMEOUT_S)
        except Exception as error:
            raise ConfigError(f"the KV transport does not start: {error!r}") from error
        atexit.register(self._leave)

    @property
    def failure(self) -> str:
        """Why nothing can be read any more; "" while all is well."""
        return self._failure

    @property
    def num_reads(self) -> int:
        """Reads whose end was not reported yet."""
        return self._num_reads

    @property
    def num_in_progress(self) -> int:
        """Handles posted and not terminal."""
        return len(self._posted)

    @property
    def num_bytes_in_progress(self) -> int:
        """What those handles move; at most `PEER_BYTES_MAX` per peer, or one handle."""
        return self._num_bytes

    @property
    def oldest_in_progress_ms(self) -> int:
        """Age of the oldest handle in progress (a post that blocks included), 0 without one."""
        oldest_s = self._oldest_s
        return 0 if oldest_s is None else int((time.monotonic() - oldest_s) * 1000)

    def local_info(self) -> TransportInfo:
        """What other workers need to read from here."""
        return self._agent.info

    def add_peer(self, name: str, info: TransportInfo) -> None:
        """Make a peer known and connect to it, on the transport's thread."""
        self._put(lambda: self._add(name, info))

    def remove_peer(self, name: str) -> None:
        """Fail what is not posted yet; forget the peer when nothing is in progress."""
        with contextlib.suppress(RemoteFault):  # an ended transport knows nobody
            self._put(lambda: self._remove(name))

    def read(
        self, read_id: int, peer: str, src_blocks: Sequence[int], dst_blocks: Sequence[int]
    ) -> None:
        """Queue a read of the peer's ``src_blocks[i]`` into our ``dst_blocks[i]``.

        Raises:
            ValueError: lists of unequal length, or a destination outside our pool.
            CapacityError: `READS_MAX` reads have not ended; nothing was queued.
            RemoteFault: the transport has failed or is closed; nothing was queued.
        """
        src = np.asarray(src_blocks, dtype=np.int32)
        dst = np.asarray(dst_blocks, dtype=np.int32)
        if src.shape != dst.shape or src.ndim != 1:
            raise ValueError(f"{len(src_blocks)} source and {len(dst_blocks)} destination blocks")
        if not are_inside(dst, self._agent.info.num_blocks):
            raise ValueError("a destination block lies outside the pool")
        # Neighbours become one descriptor where both sides ascend; the order is ours to choose.
        order = src.argsort()
        piece_blocks = -(-len(src) // max(1, -(-len(src) // self._handle_blocks_max)))
        made = Read(read_id, peer, src[order], dst[order], piece_blocks)
        self._put(lambda: self._start(made), num_reads=1)

    def check(self) -> None:
        """Have the agent READ from itself; an ended transport knows what is wrong already."""
        with contextlib.suppress(RemoteFault):
            self._put(self._check)

    def close(self, timeout_s: float) -> bool:
        """Fail what is not posted and wait for what is; nothing is read any more.

        Returns:
            Whether every handle became terminal. If not, their destinations may be written until
            the process ends, and it must end before anything is done with them. Handles that
            become terminal later are still reported.
        """
        with contextlib.suppress(RemoteFault):  # has ended already
            self._put(self._close)
        try:
            self._idle.result(timeout_s)
        except TimeoutError:
            return False
        return not self._posted

    def _leave(self) -> None:
        # Python ends a daemon thread wherever it is; inside NIXL that aborts the process.
        self._exiting = True
        with contextlib.suppress(RemoteFault):
            self._put(lambda: None)  # wakes it
        with contextlib.suppress(TimeoutError):
            self._idle.result(EXIT_TIMEOUT_S)

    def _put(self, command: Callable[[], None], num_reads: int = 0) -> None:
        with self._ending:
            if self._failure:
                raise RemoteFault(f"the KV transport has ended: {self._failure}")
            if num_reads and self._num_reads >= READS_MAX:
                raise CapacityError(f"{READS_MAX} reads are waiting")
            self._num_reads += num_reads
            self._commands.put(command)

    # --- everything below runs on the transport's thread

    def _main(self, pool: PoolRegion, started: "Future[NixlAgent]") -> None:
        try:
            if pool.memory_kind == "VRAM":
                torch.cuda.set_device(pool.device_id)
            self._agent = NixlAgent(self._name, pool)
        except Exception as error:
            self._failure = str(error)
            started.set_exception(error)
            return
        started.set_result(self._agent)
        try:
            while not self._exiting and (self._posted or not self._closing):
                self._run_commands(self._wait_s())
                progress = self._post_pieces() | self._poll()
                if not any(peer.can_post for peer in self._peers.values()):
                    self._report_ended()
                if progress:
                    self._active_s = time.monotonic()
            self._end("the process ends" if self._exiting else "closed")
        except Exception as error:
            # A bug, but one that must not pass for a healthy worker.
            _log.exception("the KV transport's thread failed")
            self._end(repr(error))
        self._idle.set_result(None)
        if self._posted:
            threading.Event().wait()  # holds the handles: their finalisers would release them

    def _end(self, why: str) -> None:
        with self._ending:
            self._failure = why
        self._close()
        self._run_commands(0.0)
        self._report_ended()

    def _run_commands(self, wait_s: float | None) -> None:
        """Run what is queued; wait for more where there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            self._commands.get(timeout=wait_s)()
            while True:
                self._commands.get_nowait()()

    def _wait_s(self) -> float | None:
        if any(peer.can_post for peer in self._peers.values()):
            return 0.0
        if not self._posted:
            return None
        # At least 50 us; 1 % of the silence so far, so that a stopped peer costs no core.
        silent_s = time.monotonic() - self._active_s
        return min(max(silent_s / 100, 50e-6), 5e-3)

    def _add(self, name: str, info: TransportInfo) -> None:
        peer = self._peers.get(name)
        if peer is not None and peer.removing:
            peer.again = info
        elif peer is None or peer.pool is None:
            self._connect(name, info)
        elif peer.info != info:
            _log.error("peer %s announced another pool in the same epoch; ignored", name)

    def _connect(self, name: str, info: TransportInfo) -> Peer:
        peer = self._peers[name] = Peer(name, info)
        ours = self._agent.info
        if name == self._name:
            peer.error = "a worker does not read from itself"
        elif info.block_bytes != ours.block_bytes:
            peer.error = f"{name} has blocks of {info.block_bytes} bytes, not {ours.block_bytes}"
        else:
            try:
                peer.pool = self._agent.add_peer(name, info)
            except RemoteFault as error:
                peer.error = error.message
        if peer.error:
            _log.warning("no KV reads from %s: %s", name, peer.error)
        return peer

    def _remove(self, name: str) -> None:
        peer = self._peers.get(name)
        if peer is None:
            return
        peer.removing = True
        peer.again = None
        self._fail_waiting(peer, f"peer {name} was removed")
        self._forget_when_idle(peer)

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
            fresh = self._connect(name, peer.again)
            fresh.waiting = peer.waiting
            fresh.mend_after_s, fresh.mend_delay_s = peer.mend_after_s, peer.mend_delay_s
            if fresh.error:
                self._fail_waiting(fresh, fresh.error)

    def _start(self, read: Read) -> None:
        peer = self._peers.get(name := read.peer)
        if peer is not None and peer.pool is None and peer.mend(time.monotonic()):
            self._forget_when_idle(peer)
            peer = self._peers[name]
        if self._closing:
            read.error = "the transport is closing"
        elif peer is None or (peer.removing and peer.again is None):
            read.error = f"peer {name} is unknown"
        elif peer.error:
            read.error = peer.error
        elif not are_inside(read.src, (peer.again or peer.info).num_blocks):
            read.error = f"a source block lies outside the pool of {name}"
        if read.error or not read.src.size or peer is None:
            self._report(read)
        else:
            peer.waiting.append(read)

    def _post_pieces(self) -> bool:
        """Post one handle to each peer that has a turn; whether there was one."""
        posted = False
        for peer in list(self._peers.values()):
            if not peer.can_post or peer.pool is None:
                continue
            posted = True
            read = peer.waiting[0]
            piece, num_bytes = read.next_piece, peer.bytes_of(read.next_piece)
            try:
                handle = self._agent.make_read(peer.pool, read.src[piece], read.dst[piece])
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
                self._report_ended()  # only now: who is woken runs while this is inside NIXL
            self._settle(handle, self._agent.post)
        return posted

    def _poll(self) -> bool:
        """Look at every handle in progress; whether one became terminal."""
        before = len(self._posted)
        for handle in list(self._posted):
            self._settle(handle, self._agent.is_done)
        self._note_progress()
        return len(self._posted) < before

    def _note_progress(self) -> None:
        # Published by the thread: others cannot walk a dict that changes.
        self._num_bytes = sum(posted.num_bytes for posted in self._posted.values())
        self._oldest_s = next((posted.posted_s for posted in self._posted.values()), None)

    def _settle(self, handle: ReadHandle, ask: Callable[[ReadHandle], bool]) -> None:
        error = ""
        try:
            if not ask(handle):
                return
        except RemoteFault as fault:
            error = fault.message
        posted = self._posted.pop(handle)
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
        self._ended.append(read)
        if read.error:
            self._check()  # the peer's fault, or ours?

    def _check(self) -> None:
        if not self._closing:
            self._agent.check()  # raises where no peer can be at fault: the transport ends

    def _report_ended(self) -> None:
        while self._ended:
            read = self._ended.popleft()
            with self._ending:
                self._num_reads -= 1
            try:
                self._on_read_done(read.read_id, read.error)
            except Exception:
                _log.exception("on_read_done(%d)", read.read_id)

    def _close(self) -> None:
        self._closing = True
        for peer in list(self._peers.values()):
            self._fail_waiting(peer, "the transport is closing")
