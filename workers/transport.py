"""The transport that moves KV blocks into a worker: its protocol."""

from collections.abc import Sequence
from typing import Protocol

from disagg.messages.identity import Incarnation
from disagg.transfer.read_plan import ReadPlan
from disagg.wire.stream_hello import PoolInfo


def agent_name(incarnation: Incarnation) -> str:
    """Name of a worker's transport agent; the epoch is part of it."""
    return f"{incarnation.worker_id}:{incarnation.epoch}"


def rank_name(agent_name: str, rank: int) -> str:
    """Name of a rank's agent."""
    return f"{agent_name}/{rank}"


def agent_names(agent_name: str, num_ranks: int) -> tuple[str, ...]:
    """Names of the agents of all ranks; the only one has the worker's."""
    if num_ranks == 1:
        return (agent_name,)
    return tuple(rank_name(agent_name, rank) for rank in range(num_ranks))


class KVTransport(Protocol):
    """Reads blocks of other workers' pools into this worker's pool.

    No call waits. Peers are named ``worker_id:epoch``, so a restarted worker is another peer.
    """

    @property
    def failure(self) -> str:
        """Why nothing can be read any more; "" while all is well."""
        ...

    @property
    def num_reads(self) -> int:
        """Reads whose end was not reported yet."""
        ...

    @property
    def num_in_progress(self) -> int:
        """Handles posted and not terminal; their destinations may still be written."""
        ...

    @property
    def oldest_in_progress_ms(self) -> int:
        """Age of the oldest of them, 0 when there is none."""
        ...

    def local_pools(self) -> tuple[PoolInfo, ...]:
        """What other workers need to read from here: a pool per rank."""
        ...

    def add_peer(self, name: str, pools: Sequence[PoolInfo], plan: ReadPlan | None = None) -> None:
        """Make a peer known; a failure shows as the error of every READ.

        Args:
            name: of the worker.
            pools: one per rank of it.
            plan: how parts of its blocks are read; None: it has as many ranks, and equal blocks.
        """
        ...

    def remove_peer(self, name: str) -> None:
        """Forget a peer once no handle to it is in progress; what is not posted yet fails."""
        ...

    def read(
        self,
        read_id: int,
        peer: str,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        parts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Read the peer's ``src_blocks[i]`` into our ``dst_blocks[i]``, on every rank.

        Of a peer that was added with a plan only the part ``parts[i]``, see `PostRead`.

        The end is reported exactly once, when every handle of every rank is terminal. Until then
        the destinations must stay held. After it they hold the peer's bytes, or anything where an
        error was reported; only the owner's commit confirms that they are the right ones.

        Raises:
            CapacityError: it has enough reads for now; to be called again when some have ended.
        """
        ...

    def check(self) -> None:
        """Start a check whether this worker can still READ; its result is in `failure`."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Stop; False when handles stay in progress, then only the process's end is a fence."""
        ...
