"""First messages of the streams; they concern the shells alone, so the core does not know them."""

from dataclasses import dataclass

from disagg.messages.identity import Incarnation
from disagg.messages.registration import Contract


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """What a reader must know to read the pool of one rank; valid for one epoch."""

    transport_metadata: bytes
    """Of the rank's NIXL agent."""
    pool_address: int
    num_blocks: int
    block_bytes: int
    memory_kind: str
    """DRAM or VRAM."""
    device_id: int


@dataclass(frozen=True, slots=True)
class PeerHello:
    """First message of a peer stream, in both directions: the sender, and where its KV lies."""

    contract: Contract
    address: str
    """host:port of the sender's own gRPC service."""
    pools: tuple[PoolInfo, ...]
    """One per rank, in their order: a block has the same id in each."""


@dataclass(frozen=True, slots=True)
class SessionOpen:
    """First message of a router's session."""

    router_id: str
    worker: Incarnation
    """Who the router believes to talk to; another epoch ends the session."""
    takes_batches: bool = False
    """What it is sent may have more messages behind it in one."""
