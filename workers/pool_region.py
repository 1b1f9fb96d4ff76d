"""The KV memory of a worker as a transport sees it: a region, whatever is in it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, eq=False)
class PoolRegion:
    """``num_blocks`` blocks of ``block_bytes`` bytes each, one after the other.

    The memory is neither moved nor freed while the process lives: a peer may read it at any time,
    and a READ may land in it after everybody here has forgotten it.

    Attributes:
        address: of block 0's first byte.
        memory_kind: where the address is valid.
        device_id: the CUDA device's index for VRAM, else 0.
        owner: what keeps the memory alive.
    """

    address: int
    num_blocks: int
    block_bytes: int
    memory_kind: Literal["DRAM", "VRAM"]
    device_id: int
    owner: object
