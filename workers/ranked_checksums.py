"""Checksums of blocks that several ranks share: each rank computes those of its parts."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from disagg.workers.checksums import ComputesChecksums, OnFailed, OnKnown, PoolChecksums, combined
from disagg.workers.pool_region import PoolRegion, RankedPool
from disagg.workers.rank_connections import RankAddress, connect_rank


def start_checksums(
    pool: PoolRegion | RankedPool, on_known: OnKnown, on_failed: OnFailed
) -> ComputesChecksums:
    """What computes the checksums of a worker's blocks, in this process or in its ranks'.

    Raises:
        ConfigError: a rank does not come.
    """
    if isinstance(pool, PoolRegion):
        return PoolChecksums(pool, on_known, on_failed)
    return RankedChecksums(pool.connect_checksums(), on_known, on_failed)


class RankChecksums:
    """Those of one rank's parts, in its own process; it ends with its connection.

    Args:
        rank: counted from 0.
        pool: the rank's part of the KV.
        address: at which the worker's process listens, see `accept_ranks`.
    """

    def __init__(self, rank: int, pool: PoolRegion, address: RankAddress) -> None:
        self._connection = connect_rank(address, rank)
        self._checksums = PoolChecksums(pool, self._send, self._failed)
        name = f"requests for checksums of rank {rank}"
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # the worker's process ends with its ranks
            while True:
                self._checksums.compute(*self._connection.recv())

    def _send(self, request_id: int, checksums: Sequence[int]) -> None:
        with contextlib.suppress(OSError):
            self._connection.send((request_id, checksums))

    def _failed(self, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._connection.send((None, reason))


class RankedChecksums:
    """See `ComputesChecksums`: those of all ranks for a block, in one.

    Args:
        connections: to the ranks, in their order.
        on_known: see `OnKnown`; called on a thread of this object.
        on_failed: see `OnFailed`; called on such a thread.
    """

    def __init__(
        self, connections: "Sequence[Connection[Any, Any]]", on_known: OnKnown, on_failed: OnFailed
    ) -> None:
        self._connections = connections
        self._on_known = on_known
        self._on_failed = on_failed
        self._lock = threading.Lock()  # what ranks have answered
        self._answers: dict[int, dict[int, Sequence[int]]] = {}
        self._num_blocks = 0
        self._closed = False
        for rank, connection in enumerate(connections):
            name = f"checksums of rank {rank}"
            threading.Thread(
                target=self._listen, args=(rank, connection), name=name, daemon=True
            ).start()

    def compute(self, request_id: int, blocks: Sequence[int]) -> None:
        """See `ComputesChecksums`."""
        self._answers[request_id] = {}
        self._num_blocks += len(blocks)
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the thread that listens says it
                connection.send((request_id, blocks))

    def counts(self) -> Mapping[str, int]:
        """Blocks that were asked for."""
        return {"checksummed_blocks": self._num_blocks}

    def close(self, timeout_s: float) -> bool:
        """See `ComputesChecksums`; the ranks end with this process."""
        self._closed = True
        return True

    # --- on a thread per rank

    def _listen(self, rank: int, connection: "Connection[Any, Any]") -> None:
        try:
            while True:
                request_id, answer = connection.recv()
                if request_id is None:
                    self._fail(f"rank {rank}: {answer}")
                elif (of_ranks := self._complete(rank, request_id, answer)) is not None:
                    checksums = [combined(parts) for parts in zip(*of_ranks, strict=True)]
                    self._on_known(request_id, checksums)
        except (EOFError, OSError):
            self._fail(f"the checksums of rank {rank} have ended")
        except Exception as bug:  # who waits for a checksum would wait for ever
            self._fail(f"checksums of rank {rank}: {bug!r}")

    def _complete(
        self, rank: int, request_id: int, answer: Sequence[int]
    ) -> list[Sequence[int]] | None:
        """The answers of all ranks in their order, once the last one has answered."""
        with self._lock:
            answers = self._answers[request_id]
            answers[rank] = answer
            if len(answers) < len(self._connections):
                return None
            del self._answers[request_id]
        return [answers[number] for number in range(len(answers))]

    def _fail(self, reason: str) -> None:
        if not self._closed:
            self._on_failed(reason)
