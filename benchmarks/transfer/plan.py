"""What a node of the transfer benchmarks is made of, and what follows from it."""

from dataclasses import dataclass, fields

from disagg.kv.kinds.kind import Spec
from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.registration import Contract
from disagg.scheduling.limits import WorkerLimits
from disagg.wire.stream_hello import PeerHello, PoolInfo
from disagg.workers.options import WorkerOptions

HANDLE_BYTES_MAX = int(
    next(str(one.default) for one in fields(WorkerOptions) if one.name == "read_handle_bytes_max")
)


@dataclass(frozen=True)
class NodePlan:
    """What a node is made of.

    Attributes:
        name: worker id.
        layers: what each layer keeps; both nodes of a pair have the same.
        num_blocks: of the pool, the null block included.
        max_step_tokens: of a prefill chunk.
        tokens_per_s: of the stand-in engine; 0 is as fast as it goes.
        writes: the stand-in writes what can be compared.
        handle_bytes_max: as `WorkerOptions.read_handle_bytes_max`.
        checksums: as `WorkerOptions.checksums`.
        model_dir: checkpoint of a real engine, whose layers replace ``layers``; "" for none.
        device: of the pool, ``cpu`` or ``cuda``.
    """

    name: str
    layers: tuple[Spec | None, ...]
    num_blocks: int
    max_step_tokens: int = 1 << 20
    tokens_per_s: float = 0.0
    writes: bool = True
    handle_bytes_max: int = HANDLE_BYTES_MAX
    checksums: bool = False
    model_dir: str = ""
    device: str = "cpu"

    def limits(
        self, layout: KVCacheLayout, max_model_tokens: int, max_step_tokens: int
    ) -> WorkerLimits:
        """Limits of the node's scheduler, too wide to matter in a measurement."""
        return WorkerLimits(
            max_model_tokens=max_model_tokens,
            max_step_tokens=max_step_tokens,
            max_sequences=64,
            max_waiting=1024,
            handover_share_max=1.0,
            reserve_timeout_ms=2_000,
            reserve_passes_max=20,
            reservation_ttl_ms=120_000,
            lease_ttl_ms=60_000,
            committed_max=1024,
            commit_repeat_ms=500,
            read_stuck_ms=60_000,
            blocks_per_read_max=max(1, self.handle_bytes_max // layout.block_bytes),
            quarantine_share_max=0.05,
            checksums=self.checksums,
        )


def hello_of(layout: KVCacheLayout, address: str, pools: tuple[PoolInfo, ...]) -> PeerHello:
    """First message of a node's peer streams."""
    contract = Contract("benchmark", "", (), "", layout.block_bytes, 16, "", 1, 1)
    return PeerHello(contract, address, pools)
