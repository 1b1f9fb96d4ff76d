"""Plain numbers and names a worker is built from; settings are read elsewhere."""

from dataclasses import dataclass, field
from typing import Final, Literal

from disagg.messages.registration import DEFAULT_REVISION

AUTO: Final = "auto"
Auto = Literal["auto"]
"""Decided by the worker from its machine and checkpoint, see ``engine_plan.py``."""
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Everything one worker needs to start. Validated where the settings are read."""

    worker_id: str
    role: str
    """prefill, decode or both: what the router prefers it for; any worker can do either."""
    model_dir: str
    model_name: str
    """The name clients use."""
    router_addresses: tuple[str, ...]
    """Where routers are found: host:port of a router's gRPC service, ``dns:name:port`` for all
    addresses of a name, ``ray`` for those that the cluster knows."""
    revision: str = DEFAULT_REVISION
    """Name of this checkpoint among those that are served side by side."""
    host: str = "127.0.0.1"
    """Address the gRPC service binds to and announces."""
    port: str = "0"
    """Of the gRPC service: ``7100``, the first free one of ``7100-7119``, or ``0``: any."""
    transfer_port: str = "0"
    """Ports UCX may listen on over TCP, written alike."""
    tls_directory: str = ""
    """Certificate of this node, see ``disagg/tls``; "": everything is plain."""
    allow_insecure: bool = False
    """Serve other machines without certificates."""
    # engine
    engine: Literal["auto", "native", "vllm"] = AUTO
    """What computes the steps, see ``engines/choice.py``."""
    tensor_parallel: int = 1
    """Ranks of the vLLM engine: processes, each with a part of the weights and of every block."""
    tensor_parallel_backend: Literal["auto", "processes", "ray"] = AUTO
    """Who starts the ranks; auto, where the supervisor has not decided: this process."""
    device: str = AUTO
    """``cpu``, ``cuda`` or ``auto``."""
    dtype: Dtype | Auto = AUTO
    kv_dtype: Literal["auto", "fp8"] = AUTO
    """Of KV under the vLLM engine; ``auto``: what the checkpoint says, else ``dtype``."""
    cuda_graphs: bool = True
    """The vLLM engine compiles the model for CUDA and captures its steps."""
    num_threads: int | Auto = AUTO
    num_blocks: int | Auto = AUTO
    block_tokens: int | Auto = AUTO
    """Tokens of a KV block; auto: what the engine needs, see ``engines/block_tokens.py``."""
    hash_block_tokens: int | Auto = AUTO
    """Tokens per link of the hash chain; auto: of the smallest block."""
    hash_key: str = field(default="", repr=False)
    """The cluster's secret that keys the block hashes; a worker does not start without."""
    kv_events_endpoint: str = ""
    """ZeroMQ address that vLLM-compatible KV events are published at; "" for none."""
    kv_events_replay_endpoint: str = ""
    """ZeroMQ address that answers requests for missed KV events; "" for none."""
    tiers: tuple[str, ...] = ()
    """Stores of blocks outside the pool, fastest first, see ``tiers/options.py``."""
    workers_per_host: int = 1
    """Workers that share the host's cores and memory."""
    workers_per_gpu: int = 1
    # prefix cache
    prefix_caching: bool = True
    retention: Literal["dense", "sparse"] = "dense"
    """What stays findable after it has left a window."""
    retention_interval_tokens: int = 0
    """With ``sparse``: tokens between what is kept besides; 0: nothing."""
    deduplication: bool = True
    eviction: Literal["lru", "segmented_lru"] = "segmented_lru"
    residency_sample: float = 0.01
    """Share of the blocks whose times in the prefix cache are observed."""
    # scheduling
    max_model_tokens: int = 0
    """0: the model's own limit."""
    max_step_tokens: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    step_slow_ms: int = 10_000
    """A step that takes longer is told to the routers."""
    step_stuck_ms: int = 300_000
    """A step that takes longer ends the worker."""
    num_speculative_tokens: int = 0
    """Drafts per step and sequence; the native engine alone computes some."""
    # transfer
    handover_share_max: float = 0.5
    """Share of the pool that reservations, leases and hand-over prefills may take together."""
    reserve_timeout_ms: int = 2_000
    reserve_passes_max: int = 20
    reserve_retry_min_ms: int = 5
    reserve_retry_max_ms: int = 60
    reservation_ttl_ms: int = 120_000
    lease_ttl_ms: int = 60_000
    take_over_ms: int = 2_000
    """A sealed lease waits so long for another decode worker when its own was lost."""
    committed_max: int = 1024
    commit_repeat_ms: int = 500
    read_stuck_ms: int = 10_000
    read_handle_bytes_max: int = 16 << 20
    checksums: bool = False
    """Offers carry a checksum of each block, which its reader compares before the commit."""
    quarantine_share_max: float = 0.05
    """Share of the pool in quarantine at which this worker is not ready any more."""
    drain_ms: int = 5_000
    """Time for what goes on to end, then; the process ends after it."""
    # telemetry
    log_format: Literal["text", "json"] = "text"
    traces: str = AUTO
    """Where spans go: ``none``, ``console``, ``otlp``; auto: as the variables OTEL_* say."""
    traces_endpoint: str = ""
    """Of an OTLP collector; "": that of the variables."""
    # registration
    heartbeat_ms: int = 1_000
    discovery_ms: int = 5_000
    """Routers are looked up again that often."""
    routers_max: int = 16
    """Routers that may have a session at a time."""
    drain_timeout_ms: int = 30_000
    """Asked to end, the worker lets what goes on end for so long."""
