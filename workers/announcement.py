"""What a worker announces of itself: to routers when it registers, to peers on a new stream."""

import logging
import socket
from collections.abc import Sequence

from disagg.grammar.tokenizer_digest import tokenizer_digest
from disagg.kv.hashing import BlockHasher
from disagg.kv.shapes.layout import LAYOUT_VERSION, KVCacheLayout
from disagg.messages.identity import Incarnation
from disagg.messages.registration import (
    WIRE_MAX,
    WIRE_MIN,
    Contract,
    WorkerInfo,
)
from disagg.scheduling.admission import handover_tokens_max, served_tokens_max
from disagg.scheduling.core import WorkerCore
from disagg.scheduling.stats import group_infos
from disagg.wire.stream_hello import PeerHello, PoolInfo
from disagg.workers.checksums import ALGORITHM
from disagg.workers.engines.protocol import Engine
from disagg.workers.options import WorkerOptions
from disagg.workers.pool_region import PoolRegion

log = logging.getLogger(__name__)


class Announcement:
    """Registration and hello of one incarnation, both with the same contract.

    Args:
        incarnation: this worker.
        options: what it was started with.
        engine: its engine.
        layout: the engine's, with the hash blocks of the worker.
        hash_key: key of its block hashes; only a value derived from it is announced.
        address: host:port of its gRPC service.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        options: WorkerOptions,
        engine: Engine,
        layout: KVCacheLayout,
        hash_key: bytes,
        address: str,
    ) -> None:
        self._incarnation = incarnation
        self._options = options
        self._layout = layout
        self._address = address
        self._tokenizer_digest = tokenizer_digest(options.model_dir)
        self._contract = contract_of(engine, layout, hash_key, options.checksums)

    def worker_info(self, core: WorkerCore) -> WorkerInfo:
        """The registration; logs a warning if the pool shortens what the model could serve."""
        layout, options = self._layout, self._options
        return WorkerInfo(
            incarnation=self._incarnation,
            address=self._address,
            role=options.role,
            model=options.model_name,
            contract=self._contract,
            groups=group_infos(layout),
            max_model_tokens=self._served_tokens_max(core),
            handover_tokens_max=handover_tokens_max(core.limits, core.kv),
            num_blocks=core.kv.num_usable_blocks,
            tiers=core.tiers.infos,
            max_sequences=core.limits.max_sequences,
            revision=options.revision,
            tokenizer_digest=self._tokenizer_digest,
            takes_drain=True,
            takes_batches=True,
        )

    def _served_tokens_max(self, core: WorkerCore) -> int:
        longest = served_tokens_max(core.limits, core.kv)
        if longest < core.limits.max_model_tokens:
            log.warning(
                "worker %s serves at most %d tokens of the model's %d: its pool has %d blocks",
                self._options.worker_id,
                longest,
                core.limits.max_model_tokens,
                core.kv.num_usable_blocks,
            )
        return longest

    def hello(self, pools: Sequence[PoolInfo]) -> PeerHello:
        """First message of a peer stream: the contract, and where the KV is found."""
        return PeerHello(self._contract, self._address, tuple(pools))


def contract_of(
    engine: Engine, layout: KVCacheLayout, hash_key: bytes, checksums: bool = False
) -> Contract:
    """What a worker with this engine must have in common with another one, or with a tier."""
    hasher = BlockHasher(hash_key, layout.hash_block_tokens)
    return Contract(
        model_fingerprint=engine.fingerprint,
        dtype=engine.dtype,
        groups=tuple(f"{group.spec} layers={group.layers}" for group in layout.groups),
        page_format=engine.page_format,
        block_bytes=layout.block_bytes,
        hash_block_tokens=layout.hash_block_tokens,
        hash_scheme=hasher.scheme,
        wire_min=WIRE_MIN,
        wire_max=WIRE_MAX,
        num_ranks=1 if isinstance(engine.region, PoolRegion) else engine.region.num_ranks,
        forms=engine.forms,
        layout_version=LAYOUT_VERSION,
        checksums=ALGORITHM if checksums else "",
    )


def announced_host(host: str) -> str:
    """The address by which other hosts reach this one: the bound one unless that means "all"."""
    if host not in ("0.0.0.0", "::", ""):
        return host
    return socket.gethostbyname(socket.gethostname())
