"""Blocks in files through NIXL's own storage plugin, POSIX: what the disk tier was chosen over."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tiers.plain import Blocks

BACKEND = "POSIX"
AGENT = "files"
BOUND_S = 60.0


class NixlFiles:
    """An agent whose only backend is the plugin, over one pool.

    Args:
        pool: the blocks; registered once, as a worker's pool is.
    """

    def __init__(self, pool: Blocks) -> None:
        from nixl import _api as nixl  # type: ignore[import-untyped]

        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to standard output
        self._agent = nixl.nixl_agent(AGENT, nixl.nixl_agent_config(backends=[]))
        self._agent.create_backend(BACKEND)
        self._address, self._block_bytes = pool.ctypes.data, pool.shape[1]
        pool_region = [(self._address, pool.nbytes, 0, "")]
        self._agent.register_memory(pool_region, "DRAM", backends=[BACKEND])

    def move(
        self, direction: str, files: Sequence[Path], order: Sequence[int], offset: int
    ) -> None:
        """READ files into the pool, or WRITE them, in one handle.

        Files are opened and registered for it, as a tier with a file per block must do.

        Args:
            direction: READ or WRITE.
            files: one per block.
            order: the block of each file.
            offset: of the block in its file.
        """
        flags = os.O_RDONLY if direction == "READ" else os.O_RDWR | os.O_CREAT
        fds = [os.open(file, flags, 0o600) for file in files]
        size = self._block_bytes
        try:
            spans = [(offset, size, fd, "") for fd in fds]
            registered = self._agent.register_memory(spans, "FILE", backends=[BACKEND])
            blocks = [(self._address + block * size, size, 0) for block in order]
            here = self._agent.get_xfer_descs(blocks, "DRAM")
            there = self._agent.get_xfer_descs([(offset, size, fd) for fd in fds], "FILE")
            handle = self._agent.initialize_xfer(direction, here, there, AGENT, backends=[BACKEND])
            end_s = time.monotonic() + BOUND_S
            state = self._agent.transfer(handle)
            while state != "DONE":
                if time.monotonic() > end_s:
                    raise TimeoutError(f"a {direction} of {len(files)} files")
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)
            self._agent.deregister_memory(registered, backends=[BACKEND])
        finally:
            for fd in fds:
                os.close(fd)
