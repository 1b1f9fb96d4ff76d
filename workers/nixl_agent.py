"""The calls of NIXL we use, typed. Not thread-safe: one thread makes and uses an agent.

NIXL reports failures as exceptions of many classes; here each is a `RemoteFault`.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np
import numpy.typing as npt
from nixl import _api as nixl  # type: ignore[import-untyped]

from disagg.errors import RemoteFault
from disagg.wire.stream_hello import PoolInfo
from disagg.workers.part_reads import Bytes
from disagg.workers.pool_region import PoolRegion

if "NIXL_LOG_LEVEL" not in os.environ:
    # It writes lines of its own on standard output, two for every agent that has started well.
    logging.getLogger("nixl").setLevel(logging.WARNING)

BlockIds = npt.NDArray[np.signedinteger[Any]]
ReadHandle = NewType("ReadHandle", object)
"""One posted READ."""


@dataclass(frozen=True, slots=True)
class PreparedPool:
    """A pool's blocks, ready to be read or written by index."""

    handle: object
    num_blocks: int


_kept: list[object] = []
"""Agents and pools stay as long as the process: a peer may read a pool at any time, and memory
unmapped under a read has ended its owner's process (tcp)."""


@contextmanager
def _failures_as_remote_fault(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RemoteFault(f"{what}: {type(error).__name__}: {error}") from error


CHECK_POLLS = 5_000
"""A millisecond apart; polls and not time, as the process may have been stopped meanwhile."""
READ_VARIABLE = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
"""Whether UCX reads another process's GPU memory itself. Left alone it does so only where GPUs are
joined by NVLink; elsewhere the owner's CPU sends everything over TCP (0.5 GB/s in place of 248
between two processes on one H200). Either way only the reader writes into its memory."""
PROGRESS_WAIT_US = 100_000
"""Longest sleep of the progress thread; events wake it at once."""


@contextmanager
def _patient_progress_thread() -> Iterator[None]:
    """Let the progress thread sleep between events.

    NIXL's Python API sets its wait to 0, so that it polls without end: measured, an idle worker
    took whatever a core had left. There is no argument for it, hence the detour.
    """
    config = nixl.nixlBind.nixlAgentConfig

    class PatientConfig(config):  # type: ignore[misc, valid-type]
        @property
        def pthrDelay(self) -> int:
            """The wait in microseconds."""
            return PROGRESS_WAIT_US

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:
            config.pthrDelay.__set__(self, PROGRESS_WAIT_US)

    nixl.nixlBind.nixlAgentConfig = PatientConfig
    try:
        yield
    finally:
        nixl.nixlBind.nixlAgentConfig = config


class NixlAgent:
    """One agent with one registered pool.

    Args:
        name: unique among all agents that ever meet.
        pool: the own KV memory; registered once, kept for ever.

    Raises:
        RemoteFault: NIXL could not start or register the pool.
    """

    def __init__(self, name: str, pool: PoolRegion) -> None:
        if pool.memory_kind == "VRAM":  # elsewhere UCX would warn that nothing uses it
            os.environ.setdefault(READ_VARIABLE, "on")
        with _failures_as_remote_fault("starting NIXL"):
            # Without a progress thread a busy owner stalls its readers by 5-40 ms (tcp).
            config = nixl.nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
            with _patient_progress_thread():
                self._agent: Any = nixl.nixl_agent(name, config)
            self._name = name
            self._num_parts = pool.num_parts  # and of every peer's blocks
            self._loop: PreparedPool | None = None  # our own pool as a peer sees it
            _kept.append((self._agent, pool))
            num_bytes = pool.num_blocks * pool.block_bytes
            memory = [(pool.address, num_bytes, pool.device_id, "")]
            self._agent.register_memory(memory, pool.memory_kind)
            metadata: bytes = self._agent.get_agent_metadata()
        self.info = PoolInfo(
            transport_metadata=metadata,
            pool_address=pool.address,
            num_blocks=pool.num_blocks,
            block_bytes=pool.block_bytes,
            memory_kind=pool.memory_kind,
            device_id=pool.device_id,
        )
        with _failures_as_remote_fault("preparing the own pool"):
            self.pool: PreparedPool = self._prepare("NIXL_INIT_AGENT", self.info)

    def add_peer(self, name: str, info: PoolInfo) -> PreparedPool:
        """Load a peer's metadata, connect to it and prepare its pool.

        Raises:
            RemoteFault: NIXL refused, or the metadata belongs to somebody else.
        """
        with _failures_as_remote_fault(f"adding {name}"):
            loaded: bytes | str = self._agent.add_remote_agent(info.transport_metadata)
            actual = loaded.decode() if isinstance(loaded, bytes) else loaded
            try:
                if actual != name:
                    raise ValueError(f"its metadata names {actual!r}")
                self._agent.make_connection(name)  # else the first READ takes 90-150 ms more
                return self._prepare(name, info)
            except Exception:
                self._agent.remove_remote_agent(actual)
                raise

    def remove_peer(self, name: str, pool: PreparedPool) -> None:
        """Forget a peer to which no handle is in progress."""
        with _failures_as_remote_fault(f"removing {name}"):
            self._agent.release_dlist_handle(pool.handle)
            self._agent.remove_remote_agent(name)

    def make_read(self, source: PreparedPool, src: BlockIds, dst: BlockIds) -> ReadHandle:
        """Make, but do not post, a READ of ``src`` blocks into our ``dst`` blocks."""
        own, peers = self._descriptors(self.pool, dst), self._descriptors(source, src)
        with _failures_as_remote_fault("making a READ"):
            handle = self._agent.make_prepped_xfer(
                "READ", self.pool.handle, own, source.handle, peers
            )
            return ReadHandle(handle)

    def make_range_read(
        self, name: str, info: PoolInfo, src: Bytes, dst: Bytes, lengths: Bytes
    ) -> ReadHandle:
        """Make, but do not post, a READ of ranges of a peer's pool; offsets and lengths in bytes.

        The descriptors are made anew each time: prepared, there would be one for every range of
        every block.
        """
        own = _described(self.info, dst, lengths)
        peers = _described(info, src, lengths)
        with _failures_as_remote_fault("making a READ of ranges"):
            own_list = self._agent.get_xfer_descs(own, self.info.memory_kind)
            peer_list = self._agent.get_xfer_descs(peers, info.memory_kind)
            return ReadHandle(self._agent.initialize_xfer("READ", own_list, peer_list, name))

    def post(self, handle: ReadHandle) -> bool:
        """Post a READ (this can block); True when it is done already."""
        with _failures_as_remote_fault("posting a READ"):
            return _is_done(self._agent.transfer(handle))

    def is_done(self, handle: ReadHandle) -> bool:
        """Whether a posted READ is done; an exception ends it too."""
        with _failures_as_remote_fault("READ"):
            return _is_done(self._agent.check_xfer_state(handle))

    def release(self, handle: ReadHandle) -> None:
        """Give back a terminal handle. Never call it while the READ is in progress."""
        with _failures_as_remote_fault("releasing a READ"):
            self._agent.release_xfer_handle(handle)

    def check(self) -> None:
        """READ this worker's null block onto itself: takes 50 us, and no peer can be at fault.

        Raises:
            RemoteFault: this agent cannot READ, so that no peer will ever be read from here.
        """
        null_block = np.zeros(1, dtype=np.int32)
        with _failures_as_remote_fault("preparing the own pool"):
            if self._loop is None:
                self._loop = self._prepare(self._name, self.info)
        handle = self.make_read(self._loop, null_block, null_block)
        done = self.post(handle)
        for _ in range(CHECK_POLLS):
            if done:
                return self.release(handle)
            time.sleep(0.001)
            done = self.is_done(handle)
        raise RemoteFault("the own NIXL agent does not end a READ from itself")

    def _prepare(self, name: str, info: PoolInfo) -> PreparedPool:
        size = info.block_bytes // self._num_parts
        # A strided row for each part: (address, length, device, stride, count).
        rows = [
            [
                info.pool_address + part * info.num_blocks * size,
                size,
                info.device_id,
                size,
                info.num_blocks,
            ]
            for part in range(self._num_parts)
        ]
        blocks = np.array(rows, dtype=np.uint64)
        handle = self._agent.prep_xfer_dlist(name, blocks, info.memory_kind)
        return PreparedPool(handle, info.num_blocks)

    def _descriptors(self, pool: PreparedPool, blocks: BlockIds) -> BlockIds:
        """Indexes of the blocks' parts in a prepared pool."""
        if self._num_parts == 1:
            return blocks
        firsts = np.arange(self._num_parts, dtype=blocks.dtype)[:, None] * pool.num_blocks
        return (firsts + blocks).ravel()


def _described(info: PoolInfo, offsets: Bytes, lengths: Bytes) -> npt.NDArray[np.uint64]:
    """Rows of (address, length, device)."""
    rows = np.empty((len(offsets), 3), dtype=np.uint64)
    rows[:, 0] = info.pool_address + offsets
    rows[:, 1] = lengths
    rows[:, 2] = info.device_id
    return rows


def _is_done(state: str) -> bool:
    if state == "ERR":
        raise RuntimeError("NIXL reports ERR")
    return state == "DONE"
