"""KV reads by NIXL, posted and polled on one thread of their own: a post can block for 0.5 s."""

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from disagg.errors import CapacityError, ConfigError, RemoteFault
from disagg.telemetry.open_files import why_few_files
from disagg.transfer.read_plan import ReadPlan
from disagg.wire.stream_hello import PoolInfo
from disagg.workers.nixl_agent import NixlAgent
from disagg.workers.nixl_reads import NixlReads
from disagg.workers.part_reads import PartReads
from disagg.workers.peer_reads import Read, Siblings, are_inside
from disagg.workers.pool_region import PoolRegion
from disagg.workers.transport import agent_names

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 5.0
READS_MAX = 4096
"""Reads taken and not reported yet; a caller with more tries again later."""
HANDLE_RANGES_MAX = 1 << 14
"""Ranges of bytes in one handle, where parts of blocks are read."""


class NixlTransport:
    """See `KVTransport`. Making one takes up to some seconds.

    Args:
        agent_name: ``worker_id:epoch``.
        pool: the own KV memory; it stays registered and alive as long as the process.
        on_read_done: called on the transport's thread with (read id, error or "").
        handle_bytes_max: a read is cut into equal handles of at most this size, 1-16 MiB (of one
            block at least): fewer cost less, larger ones delay what comes after.
        rank: of this process among those of its worker.

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
        rank: int = 0,
    ) -> None:
        self._name = agent_name
        self._rank = rank
        self._handle_bytes_max = handle_bytes_max
        self._in_parts: dict[str, PartReads] = {}
        """Peers whose blocks are not like ours; the calls' business alone."""
        self._on_read_done = on_read_done
        self._handle_blocks_max = max(1, handle_bytes_max // pool.block_bytes)
        # Calls meet the thread here alone; the reads belong to the thread.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._exiting = False
        # Written by the thread, read by all.
        self._failure = ""
        self._ending = threading.Lock()  # no command slips in behind the last one
        self._num_reads = 0  # under that lock
        self._idle: Future[None] = Future()
        started: Future[NixlAgent] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(pool, started), name=f"nixl {agent_name}", daemon=True
        )
        self._thread.start()
        try:
            self._agent = started.result(START_TIMEOUT_S)
        except Exception as error:
            said = f"the KV transport does not start: {error!r}{why_few_files()}"
            raise ConfigError(said) from error
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
        return self._reads.num_in_progress

    @property
    def num_bytes_in_progress(self) -> int:
        """What those handles move; at most `PEER_BYTES_MAX` per peer, or one handle."""
        return self._reads.num_bytes

    @property
    def oldest_in_progress_ms(self) -> int:
        """Age of the oldest handle in progress (a post that blocks included), 0 without one."""
        oldest_s = self._reads.oldest_s
        return 0 if oldest_s is None else int((time.monotonic() - oldest_s) * 1000)

    def local_pools(self) -> tuple[PoolInfo, ...]:
        """What other workers need to read from here: the one pool."""
        return (self._agent.info,)

    def add_peer(self, name: str, pools: Sequence[PoolInfo], plan: ReadPlan | None = None) -> None:
        """Make a peer known and connect to it, on the transport's thread.

        With a plan to those of its ranks that have parts of our blocks, else to its only one.
        """
        if plan is None:
            (info,) = pools
            self._put(lambda: self._reads.add_peer(name, info))
            return
        parts = PartReads.of(plan, self._rank, agent_names(name, len(pools)), pools)
        self._in_parts[name] = parts
        for rank in parts.ranks:
            self._put(partial(self._reads.add_peer, parts.agents[rank], pools[rank], True))

    def remove_peer(self, name: str) -> None:
        """Fail what is not posted yet; forget the peer when nothing is in progress."""
        parts = self._in_parts.pop(name, None)
        agents = (name,) if parts is None else [parts.agents[rank] for rank in parts.ranks]
        with contextlib.suppress(RemoteFault):  # an ended transport knows nobody
            for agent in agents:
                self._put(partial(self._reads.remove_peer, agent))

    def read(
        self,
        read_id: int,
        peer: str,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        parts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Queue a read of the peer's ``src_blocks[i]`` into our ``dst_blocks[i]``.

        Raises:
            ValueError: lists of unequal length, a destination outside our pool, or whole blocks of
                a peer whose blocks are not like ours.
            CapacityError: `READS_MAX` reads have not ended; nothing was queued.
            RemoteFault: the transport has failed or is closed; nothing was queued.
        """
        src = np.asarray(src_blocks, dtype=np.int32)
        dst = np.asarray(dst_blocks, dtype=np.int32)
        if src.shape != dst.shape or src.ndim != 1:
            raise ValueError(f"{len(src_blocks)} source and {len(dst_blocks)} destination blocks")
        if not are_inside(dst, self._agent.info.num_blocks):
            raise ValueError("a destination block lies outside the pool")
        known = self._in_parts.get(peer)
        if src.size and known is not None and not parts:
            raise ValueError(f"{peer} has other blocks: parts of them are read")
        if parts and known is not None:
            reads = self._reads_in_parts(read_id, known, src_blocks, dst_blocks, parts)
            self._put(lambda: self._start(reads), num_reads=1)
            return
        # Neighbours become one descriptor where both sides ascend; the order is ours to choose.
        order = src.argsort()
        piece_blocks = -(-len(src) // max(1, -(-len(src) // self._handle_blocks_max)))
        made = Read(read_id, peer, src[order], dst[order], piece_blocks)
        if parts:  # of a peer that has been removed, or never was added with a plan
            made.error = f"peer {peer} is unknown"
        self._put(lambda: self._start([made]), num_reads=1)

    def _reads_in_parts(
        self,
        read_id: int,
        peer: PartReads,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        parts: Sequence[tuple[int, int]],
    ) -> list[Read]:
        """A read for each of the peer's ranks that has bytes of these blocks; at least one."""
        info = self._agent.info
        ranges = peer.ranges(src_blocks, dst_blocks, parts, info.block_bytes)
        if not ranges:  # nothing of them is ours: it ends at once
            nothing = np.zeros(0, dtype=np.int64)
            ranges = {peer.ranks[0]: (nothing, nothing, nothing)}
        siblings = Siblings(len(ranges))
        made: list[Read] = []
        for rank, (src, dst, lengths) in ranges.items():
            num_pieces = max(1, -(-int(lengths.sum()) // self._handle_bytes_max))
            num_ranges = min(max(1, -(-len(src) // num_pieces)), HANDLE_RANGES_MAX)
            agent = peer.agents[rank]
            made.append(Read(read_id, agent, src, dst, num_ranges, lengths, siblings))
        return made

    def check(self) -> None:
        """Have the agent READ from itself; an ended transport knows what is wrong already."""
        with contextlib.suppress(RemoteFault):
            self._put(self._reads.check)

    def close(self, timeout_s: float) -> bool:
        """Fail what is not posted and wait for what is; nothing is read any more.

        Returns:
            Whether every handle became terminal. If not, their destinations may be written until
            the process ends, and it must end before anything is done with them. Handles that
            become terminal later are still reported.
        """
        with contextlib.suppress(RemoteFault):  # has ended already
            self._put(self._reads.close)
        try:
            self._idle.result(timeout_s)
        except TimeoutError:
            return False
        return not self._reads.num_in_progress

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
            self._reads = NixlReads(self._agent, self._name, self._report)
        except Exception as error:
            self._failure = str(error)
            started.set_exception(error)
            return
        started.set_result(self._agent)
        try:
            while not self._exiting and not self._reads.is_over:
                self._run_commands(self._reads.wait_s())
                self._reads.advance()
            self._end("the process ends" if self._exiting else "closed")
        except Exception as error:
            # A bug, but one that must not pass for a healthy worker.
            _log.exception("the KV transport's thread failed")
            self._end(repr(error))
        self._idle.set_result(None)
        if self._reads.num_in_progress:
            threading.Event().wait()  # holds the handles: their finalisers would release them

    def _start(self, reads: Sequence[Read]) -> None:
        for read in reads:
            self._reads.start(read)

    def _end(self, why: str) -> None:
        with self._ending:
            self._failure = why
        self._reads.close()
        self._run_commands(0.0)
        self._reads.report_ended()

    def _run_commands(self, wait_s: float | None) -> None:
        """Run what is queued; wait for more where there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            self._commands.get(timeout=wait_s)()
            while True:
                self._commands.get_nowait()()

    def _report(self, read: Read) -> None:
        with self._ending:
            self._num_reads -= 1
        try:
            self._on_read_done(read.read_id, read.error)
        except Exception:
            _log.exception("on_read_done(%d)", read.read_id)
