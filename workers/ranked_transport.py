"""Reads into all ranks of a tensor-parallel worker: one agent per rank, one end for all of them."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from disagg.errors import CapacityError, ConfigError, RemoteFault
from disagg.transfer.read_plan import ReadPlan
from disagg.wire.stream_hello import PoolInfo
from disagg.workers.nixl_transport import READS_MAX, START_TIMEOUT_S
from disagg.workers.transport import rank_name

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rank:
    """What a rank's agent has said."""

    connection: "Connection[Any, Any]"
    pool: "Future[PoolInfo]"
    closed: "Future[bool]"
    failure: str = ""
    num_in_progress: int = 0
    oldest_in_progress_ms: int = 0


@dataclass(slots=True)
class _Read:
    """A read that some ranks have not ended."""

    num_left: int
    error: str = ""


class RankedTransport:
    """See `KVTransport`. A read has ended when the last rank's has; one error fails all of it.

    Args:
        connections: to the agents of all ranks, in their order.
        on_read_done: called with (read id, error or "") on a thread of this object.

    Raises:
        ConfigError: a rank's agent does not start.
    """

    def __init__(
        self,
        connections: "Sequence[Connection[Any, Any]]",
        *,
        on_read_done: Callable[[int, str], None],
    ) -> None:
        self._on_read_done = on_read_done
        self._lock = threading.Lock()  # the reads, and what is sent: all ranks get one order
        self._reads: dict[int, _Read] = {}
        self._in_parts: set[str] = set()
        """Peers whose blocks or ranks are not like ours."""
        self._ranks = [_Rank(connection, Future(), Future()) for connection in connections]
        for number, rank in enumerate(self._ranks):
            threading.Thread(
                target=self._listen, args=(number, rank), name=f"rank {number}", daemon=True
            ).start()
        self._pools = tuple(self._pool_of(number) for number in range(len(self._ranks)))

    @property
    def failure(self) -> str:
        """Why nothing can be read any more; one rank's end is that of all."""
        return next((rank.failure for rank in self._ranks if rank.failure), "")

    @property
    def num_reads(self) -> int:
        """Reads whose end was not reported yet."""
        return len(self._reads)

    @property
    def num_in_progress(self) -> int:
        """Handles posted and not terminal, of all ranks."""
        return sum(rank.num_in_progress for rank in self._ranks)

    @property
    def oldest_in_progress_ms(self) -> int:
        """Age of the oldest handle of any rank, 0 without one; a tenth of a second late."""
        return max(rank.oldest_in_progress_ms for rank in self._ranks)

    def local_pools(self) -> tuple[PoolInfo, ...]:
        """What other workers need to read from here: a pool per rank."""
        return self._pools

    def add_peer(self, name: str, pools: Sequence[PoolInfo], plan: ReadPlan | None = None) -> None:
        """Make a peer known: each rank to its counterpart, or with a plan to whom it names.

        Raises:
            ValueError: it has another number of ranks, and there is no plan.
        """
        if plan is not None:
            self._in_parts.add(name)
            self._send_each(("add_peer", name, tuple(pools), plan) for _ in self._ranks)
            return
        if len(pools) != len(self._ranks):
            raise ValueError(f"{name} has {len(pools)} ranks, this worker {len(self._ranks)}")
        self._send_each(
            ("add_peer", rank_name(name, number), (pool,)) for number, pool in enumerate(pools)
        )

    def remove_peer(self, name: str) -> None:
        """Fail what is not posted yet; forget the peer when nothing is in progress."""
        self._send_each(("remove_peer", self._name_at(name, n)) for n in range(len(self._ranks)))
        self._in_parts.discard(name)

    def _name_at(self, peer: str, rank: int) -> str:
        """What a rank knows the peer by: its counterpart's agent, or the worker as a whole."""
        return peer if peer in self._in_parts else rank_name(peer, rank)

    def read(
        self,
        read_id: int,
        peer: str,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        parts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Queue a read of the peer's ``src_blocks[i]`` into our ``dst_blocks[i]``, on every rank.

        Raises:
            CapacityError: `READS_MAX` reads have not ended; nothing was queued.
            RemoteFault: a rank has ended; nothing was queued.
        """
        if self.failure:
            raise RemoteFault(f"the KV transport has ended: {self.failure}")
        with self._lock:
            if len(self._reads) >= READS_MAX:
                raise CapacityError(f"{READS_MAX} reads are waiting")
            self._reads[read_id] = _Read(len(self._ranks))
        src, dst = list(src_blocks), list(dst_blocks)
        self._send_each(
            ("read", read_id, self._name_at(peer, number), src, dst, tuple(parts))
            for number in range(len(self._ranks))
        )

    def check(self) -> None:
        """Have every rank's agent READ from itself."""
        self._send_each(("check",) for _ in self._ranks)

    def close(self, timeout_s: float) -> bool:
        """Fail what is not posted and wait for what is, on all ranks; see `NixlTransport`."""
        self._send_each(("close", timeout_s) for _ in self._ranks)
        try:
            return all([rank.closed.result(timeout_s + 1) for rank in self._ranks])
        except (TimeoutError, RemoteFault):
            return False

    def _pool_of(self, number: int) -> PoolInfo:
        try:
            return self._ranks[number].pool.result(START_TIMEOUT_S)
        except Exception as error:
            raise ConfigError(
                f"the KV transport of rank {number} does not start: {error}"
            ) from error

    def _send_each(self, commands: "Iterable[tuple[object, ...]]") -> None:
        with self._lock:
            for number, (rank, command) in enumerate(zip(self._ranks, commands, strict=True)):
                try:
                    rank.connection.send(command)
                except OSError as error:  # the thread that listens says it too
                    rank.failure = rank.failure or f"rank {number} has ended: {error}"

    # --- on a thread per rank

    def _listen(self, number: int, rank: _Rank) -> None:
        try:
            while True:
                self._on_event(rank, *rank.connection.recv())
        except (EOFError, OSError):
            rank.failure = rank.failure or f"rank {number} has ended"
        except Exception as bug:  # one that must not pass for a healthy worker
            _log.exception("rank %d", number)
            rank.failure = rank.failure or repr(bug)
        rank.num_in_progress = rank.oldest_in_progress_ms = 0
        error = RemoteFault(rank.failure)
        for answer in (rank.pool, rank.closed):
            if not answer.done():
                answer.set_exception(error)

    def _on_event(self, rank: _Rank, kind: str, *values: Any) -> None:
        match kind:
            case "done":
                self._done(*values)
            case "state":
                rank.failure, rank.num_in_progress, rank.oldest_in_progress_ms = values
            case "pool":
                rank.pool.set_result(*values)
            case "failed":
                rank.pool.set_exception(RemoteFault(*values))
            case "closed":
                rank.closed.set_result(*values)

    def _done(self, read_id: int, error: str) -> None:
        with self._lock:
            read = self._reads[read_id]
            read.num_left -= 1
            read.error = read.error or error
            if read.num_left:
                return
            del self._reads[read_id]
        self._on_read_done(read_id, read.error)
