"""Checksums of a pool's blocks, computed on a thread of its own: nobody else waits for them."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import xxhash

from disagg.workers.pool_region import PoolRegion
from disagg.workers.tiers.pool_memory import PoolMemory

ALGORITHM = "xxh3_64"
"""As contracts name it: workers compare the checksums of blocks only if both compute these."""
PIECE_BYTES = 8 << 20
"""Of a pool that does not lend its blocks so much is copied at once, or one block."""

OnKnown = Callable[[int, Sequence[int]], None]
"""Takes the number of a request and a checksum for each of its blocks; from any thread."""
OnFailed = Callable[[str], None]
"""Takes why no more checksums come; from any thread."""


class ComputesChecksums(Protocol):
    """Computes checksums of blocks of the own pool, and reports each request exactly once."""

    def compute(self, request_id: int, blocks: Sequence[int]) -> None:
        """Begin, and return at once. The bytes are those there while it is computed."""
        ...

    def counts(self) -> Mapping[str, int]:
        """What was computed so far, by name."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End; False if it takes longer. Requests that wait are not reported."""
        ...


class PoolChecksums:
    """See `ComputesChecksums`: of one pool, request by request in their order.

    As many requests wait as the core makes: one per lease, and one per READ that has ended.

    Args:
        pool: of several ranks, the part of the one whose process this is.
        on_known: see `OnKnown`; called on the thread.
        on_failed: see `OnFailed`; called on the thread.
    """

    def __init__(self, pool: PoolRegion, on_known: OnKnown, on_failed: OnFailed) -> None:
        self._memory = PoolMemory(pool)
        self._on_known = on_known
        self._on_failed = on_failed
        self._requests: queue.SimpleQueue[tuple[int, Sequence[int]] | None] = queue.SimpleQueue()
        self._closed = False
        self._num_blocks = self._busy_ns = 0
        self._thread = threading.Thread(target=self._run, name="checksums", daemon=True)
        self._thread.start()

    def compute(self, request_id: int, blocks: Sequence[int]) -> None:
        """See `ComputesChecksums`."""
        self._requests.put((request_id, blocks))

    def counts(self) -> Mapping[str, int]:
        """Blocks, and microseconds of the thread."""
        return {"checksummed_blocks": self._num_blocks, "checksum_us": self._busy_ns // 1000}

    def close(self, timeout_s: float) -> bool:
        """See `ComputesChecksums`."""
        self._closed = True
        self._requests.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- on the thread

    def _run(self) -> None:
        try:
            while (request := self._requests.get()) is not None and not self._closed:
                request_id, blocks = request
                began_ns = time.perf_counter_ns()
                checksums = self._of(blocks)
                self._busy_ns += time.perf_counter_ns() - began_ns
                self._num_blocks += len(blocks)
                self._on_known(request_id, checksums)
        except Exception as error:  # who waits for a checksum would wait for ever
            self._on_failed(f"checksums: {error!r}")

    def _of(self, blocks: Sequence[int]) -> list[int]:
        if self._memory.lends:
            return [xxhash.xxh3_64_intdigest(self._memory.view(block)) for block in blocks]
        checksums: list[int] = []
        for first in range(0, len(blocks), self._piece_blocks):
            views = self._memory.fetch(blocks[first : first + self._piece_blocks], self._buffer)
            checksums += map(xxhash.xxh3_64_intdigest, views)
        return checksums

    @property
    def _piece_blocks(self) -> int:
        return max(1, PIECE_BYTES // self._memory.block_bytes)

    @property
    def _buffer(self) -> torch.Tensor:
        """The thread's buffer, made when it is first needed."""
        if not hasattr(self, "_staging"):
            self._staging = self._memory.staging(self._piece_blocks)
        return self._staging


def combined(of_ranks: Sequence[int]) -> int:
    """The checksum of a block of which every rank has a part."""
    return xxhash.xxh3_64_intdigest(b"".join(one.to_bytes(8, "little") for one in of_ranks))
