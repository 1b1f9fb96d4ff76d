"""The KV memory of a worker as a transport sees it: a region, whatever is in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True, eq=False)
class PoolRegion:
    """``num_blocks`` blocks of ``block_bytes`` bytes each, one after the other.

    Where an engine's kernels take the layers apart alone, a block lies in several parts: part ``p``
    of block ``b`` begins at byte ``(p * num_blocks + b) * part_bytes``. Workers that exchange KV
    have as many parts (it is in their page format).

    The memory is neither moved nor freed while the process lives: a peer may read it at any time,
    and a READ may land in it after everybody here has forgotten it.

    Attributes:
        address: of block 0's first byte.
        memory_kind: where the address is valid.
        device_id: the CUDA device's index for VRAM, else 0.
        owner: what keeps the memory alive.
        num_parts: of a block, all of one size.
    """

    address: int
    num_blocks: int
    block_bytes: int
    memory_kind: Literal["DRAM", "VRAM"]
    device_id: int
    owner: object
    num_parts: int = 1

    @property
    def part_bytes(self) -> int:
        """Bytes of a part of a block."""
        return self.block_bytes // self.num_parts


class RankedPool(Protocol):
    """KV memory in several processes: each rank holds its part of every block."""

    num_blocks: int
    """Of every rank's region."""
    num_ranks: int
    """At least two."""

    def connect(self, agent_name: str, handle_bytes_max: int) -> "Sequence[Connection[Any, Any]]":
        """Start every rank's agent (see `disagg.workers.rank_agent`); a connection to each.

        Raises:
            ConfigError: an agent does not start.
        """
        ...

    def connect_checksums(self) -> "Sequence[Connection[Any, Any]]":
        """Start what computes every rank's checksums (see `RankChecksums`); as above.

        Raises:
            ConfigError: a rank does not come.
        """
        ...

    def connect_tiers(self) -> "Sequence[Connection[Any, Any]]":
        """Start what opens every rank's tiers (see `disagg.workers.tiers.rank_tiers`); as above.

        Raises:
            ConfigError: a rank does not come.
        """
        ...
