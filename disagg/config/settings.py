"""What can be set, by concern, with ranges. Defaults equal those of the options they become."""

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    model_validator,
)

from disagg.config.autoscale_settings import AutoscaleSettings
from disagg.config.fields import (
    Milliseconds,
    Ports,
    Positive,
    Seconds,
    Section,
    Share,
)
from disagg.config.router_settings import LimitSettings, RouterSettings
from disagg.config.telemetry_settings import TelemetrySettings
from disagg.errors import ConfigError
from disagg.messages.registration import DEFAULT_REVISION, REVISION_NAME
from disagg.workers.options import AUTO, Auto, Dtype
from disagg.workers.tiers.options import parse_tiers

RouterSource = Annotated[str, Field(pattern=r"^(ray|(dns:)?[^\s:/]+:[1-9][0-9]{0,4})$")]


class ModelSettings(Section):
    """Which checkpoint is served, under which name."""

    dir: str = ""
    """Checkpoint directory, the same path on every node; nothing is downloaded."""
    name: str = ""
    """The name clients use; "" takes the directory's."""
    revision: str = Field(default=DEFAULT_REVISION, pattern=rf"^{REVISION_NAME.pattern}$")
    """Of workers: the name of what they serve. Workers of two revisions are never paired; routers
    share new requests among revisions by weight (router.revision_weights).
    """
    chat_template: str = ""
    """A file with a chat template (Jinja) to use in place of the checkpoint's."""
    tool_call_parser: Literal["auto", "none", "deepseek", "gemma", "harmony", "hermes", "llama"] = (
        AUTO
    )
    """Format of the calls of tools in the model's answers; auto: by the model's family."""
    reasoning_parser: Literal["auto", "none", "harmony", "think"] = AUTO
    """Format of its reasoning; auto: by family and chat template."""


class WorkerSettings(Section):
    """One worker process: device, arithmetic, memory."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address the worker binds to and announces; "node" is its Ray node's. Other than loopback it
    needs cluster.tls_directory, or cluster.allow_insecure.
    """
    port: Ports = "0"
    """Port of the worker's gRPC service; of a range (7100-7119), for several workers on a host, the
    first that is free; 0 any free one.
    """
    transfer_port: Ports = "0"
    """TCP port, or range of ports, on which UCX takes connections for KV: one per worker (or rank)
    and network interface; 0 any. RDMA does not use them.
    """
    engine: Literal["auto", "native", "vllm"] = AUTO
    """What computes the steps: native (transformers' model code) or vllm (vLLM's model runner, from
    the extra disagg[vllm]); auto: vllm on a GPU where it is installed, or where native does not
    know the model, else native. The log says which one was taken, and why.
    """
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    """Ranks of a worker of the vllm engine: processes with a part of the weights and of every KV
    block each, on a GPU of their own or on this host's cores.
    """
    tensor_parallel_backend: Literal["auto", "processes", "ray"] = AUTO
    """Who starts the ranks: the worker's process, all on its host (processes), or Ray, on as few
    hosts as have room (ray); auto: processes where the GPUs of single hosts are enough.
    """
    device: str = Field(default=AUTO, pattern=r"^(auto|cpu|cuda)$")
    """auto: a GPU where Ray has any; cuda is the device Ray gives the worker."""
    dtype: Dtype | Auto = AUTO
    """auto: that of the checkpoint's weights."""
    kv_dtype: Literal["auto", "fp8"] = AUTO
    """Type of KV under the vllm engine: fp8 halves what 16 bits take; auto: what the checkpoint
    says, else dtype.
    """
    cuda_graphs: bool = True
    """The vllm engine compiles the model on a GPU and captures its steps in CUDA graphs: slower to
    start, faster to decode.
    """
    num_threads: Annotated[int, Field(ge=1, le=1024)] | Auto = AUTO
    """Torch threads of a worker; auto: the cores, divided among the workers of the host."""
    num_blocks: Annotated[int, Field(ge=2, le=1 << 31)] | Auto = AUTO
    """KV blocks of a worker's pool, the null block included; auto: as many as fit.

    On the CPU half of what the weights leave of the worker's share of the memory, at most a quarter
    of the share; on a GPU nine tenths of what they leave; never more than scheduling.max_sequences
    sequences can fill.
    """
    block_tokens: Annotated[int, Field(ge=1, le=4096)] | Auto = AUTO
    """Tokens per block, a power of two; auto: what the engine's kernels take, 16, or 32 with vllm
    on the CPU. Where a linear state lies whole in a block, the vllm engine takes a multiple of it.
    """
    hash_block_tokens: Annotated[int, Field(ge=1, le=4096)] | Auto = AUTO
    """Tokens that a hash of the prefix cache stands for, a power of two that divides block_tokens;
    auto: block_tokens. One for all workers of a fleet: where block sizes differ, the smallest.
    """
    kv_events_endpoint: str = ""
    """Publish vLLM-compatible KV events at this ZeroMQ address; port 0, reported in the log, lets
    several workers share a machine.
    """
    kv_events_replay_endpoint: str = ""
    """Answer requests for missed KV events at this ZeroMQ address."""
    routers_max: int = Field(default=16, ge=1, le=1024)
    """Routers that may have a session with a worker, at a time."""
    drain_timeout_ms: Milliseconds = 30_000
    """Asked to end by SIGTERM, a worker takes no new work and lets what goes on end for so long; in
    the last quarter (10 s at most) the rest moves to other workers. A second signal ends it."""
    tiers: tuple[str, ...] = Field(default=(), strict=False)
    """Stores of KV blocks outside the pool, fastest first, each KIND[:PLACE]?size=SIZE: host memory
    (host?size=8GiB), a directory that workers may share (disk:/var/cache/kv?size=200GiB), an object
    store (object:s3://bucket/prefix?size=2TiB). Options: write, eviction, threads, slow_ms, name.
    Sizes are those of a worker: its ranks share them equally.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("block_tokens", "hash_block_tokens"):
            given = getattr(self, name)
            if isinstance(given, int) and given & (given - 1):
                raise ValueError(f"{name}: {given} is not a power of two")
        if self.kv_events_replay_endpoint and not self.kv_events_endpoint:
            raise ValueError("kv_events_replay_endpoint: needs kv_events_endpoint")
        try:
            parse_tiers(self.tiers)
        except ConfigError as error:
            raise ValueError(error.message.removeprefix("worker.")) from None
        return self


class CacheSettings(Section):
    """The prefix cache of a worker: what of computed KV other requests find, and for how long."""

    prefix_caching: bool = True
    """Requests reuse the KV of prefixes they share; false computes every prompt from its start."""
    retention: Literal["dense", "sparse"] = "dense"
    """What stays findable of sliding windows, chunks and linear states behind a request: all
    (dense); or what was seen at the end of its prompt and where it left a known prefix (sparse).
    Full attention keeps all in any case.
    """
    retention_interval_tokens: int = Field(default=0, ge=0)
    """With sparse: keeps every so many tokens besides; 0 none."""
    deduplication: bool = True
    """Of equal blocks computed twice at once only the first is cached."""
    eviction: Literal["lru", "segmented_lru"] = "segmented_lru"
    """What makes room: what nobody has found again before what somebody has (segmented_lru); or the
    least recently used (lru).
    """
    residency_sample: float = Field(default=0.01, ge=0, le=1)
    """Share of the blocks whose times in the cache are observed, for the metrics."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.retention_interval_tokens and self.retention != "sparse":
            raise ValueError("retention_interval_tokens: needs cache.retention=sparse")
        if not self.prefix_caching and self.retention != "dense":
            raise ValueError("retention: sparse needs cache.prefix_caching")
        return self


class SchedulingSettings(Section):
    """Limits of a worker's batches and of their steps."""

    max_model_tokens: int = Field(default=0, ge=0)
    """Longest prompt plus answer; 0 takes the model's own limit."""
    max_step_tokens: Positive = 512
    """Tokens computed in one step; longer prompts are prefilled in chunks."""
    max_sequences: Positive = 64
    """Sequences running at once."""
    max_waiting: Positive = 1024
    """Sequences waiting; more are refused."""
    step_slow_ms: Milliseconds = 10_000
    """While a step takes longer, routers give new requests to other workers, if there are any: it
    may be one that never ends."""
    step_stuck_ms: Milliseconds = 300_000
    """A step that has not ended for so long never will: the worker's process ends, and its requests
    go on elsewhere. It must be above the longest step of a slow machine."""
    num_speculative_tokens: int = Field(default=0, ge=0, le=64)
    """Tokens drafted per step and sequence (speculative decoding by prompt lookup): what followed
    where the last tokens stood before, in prompt or answer. 0 drafts nothing. Answers are the same
    with and without, sooner where they repeat what is there. The native engine alone computes
    drafts; models with linear states are refused.
    """


class TransferSettings(Section):
    """How KV blocks move between workers; time-outs cost time, never correctness."""

    handover_share_max: Share = 0.5
    """Share of a pool that reservations, leases and prefills to be handed over may take together.
    One at a time that alone takes more is allowed beside them."""
    reserve_timeout_ms: Milliseconds = 2_000
    reserve_passes_max: Positive = 20
    """Refused reservations after which the router plans the request anew."""
    reserve_retry_min_ms: Milliseconds = 5
    reserve_retry_max_ms: Milliseconds = 60
    reservation_ttl_ms: Milliseconds = 120_000
    lease_ttl_ms: Milliseconds = 60_000
    take_over_ms: Milliseconds = 2_000
    """A sealed lease waits so long for another decode worker when its own was lost."""
    committed_max: Positive = 1024
    """Committed leases remembered for repeated commits."""
    commit_repeat_ms: Milliseconds = 500
    read_stuck_ms: Milliseconds = 10_000
    """A read that stands still for longer quarantines its blocks; one that waits behind others from
    the same worker does so since the last of them ended."""
    read_handle_bytes_max: int = Field(default=16 << 20, ge=4096, le=16 << 20)
    """Bytes per transfer handle; tests use less than the 1 to 16 MiB that pay. One has to move
    within read_stuck_ms: at less than 20 Mbit/s between two workers fewer bytes are needed."""
    checksums: bool = False
    """Offers carry a checksum of each block; what a reader got is compared before it is committed.
    All workers that exchange KV need the same, and blocks of one size on as many ranks.
    """
    quarantine_share_max: Share = 0.05
    """Share of a pool in quarantine at which the worker leaves and comes back."""
    drain_ms: Milliseconds = 5_000
    """Time for what goes on at a worker to end before it leaves for that reason. (Asked to end, it
    has worker.drain_timeout_ms.)"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reserve_retry_min_ms > self.reserve_retry_max_ms:
            raise ValueError("reserve_retry_min_ms: must not exceed transfer.reserve_retry_max_ms")
        return self


class ClusterSettings(Section):
    """Which workers exist, where, and how they are supervised."""

    hash_key_file: str = ""
    """File with the secret that keys the names of KV blocks, the same for all routers and workers
    (disagg keys create-hash-key). disagg serve makes one of its own where none is given."""
    hash_key: str = Field(default="", repr=False)
    """The secret itself, as in DISAGG_CLUSTER__HASH_KEY."""
    ray_address: str = ""
    """Ray cluster to join, e.g. "auto" or host:6379, where workers outlive their supervisor; ""
    starts one on this machine.
    """
    num_hosts: int = Field(default=1, ge=1, le=10_000)
    """Hosts to wait for, a minute at most, before workers are spread over those that have joined;
    later ones are used as well, when workers move there.
    """
    num_prefill: int = Field(default=1, ge=0, le=1024)
    num_decode: int = Field(default=1, ge=0, le=1024)
    num_both: int = Field(default=0, ge=0, le=1024)
    """Workers without a preferred role; any worker can do both."""
    worker_id_prefix: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """Before the id of every worker (PREFIX-prefill-0): fleets of several Ray clusters that serve
    the same routers need one each, as ids are unique among a router's workers.
    """
    role_resources: bool = False
    """Place workers by the Ray resources disagg_prefill and disagg_decode."""
    num_cpus_per_worker: float = Field(default=0.1, ge=0, le=1024)
    """CPUs Ray counts for a worker; it limits placement, not use."""
    num_gpus_per_worker: float = Field(default=1, ge=0, le=1024)
    """GPUs Ray counts for a worker on cuda; less than 1 lets workers share one. With worker.device
    auto workers share as many as there are.
    """
    router_addresses: tuple[RouterSource, ...] = Field(default=(), strict=False)
    """Where workers find the routers, all of which they serve: host:port of a router's gRPC
    service; dns:name:port for every address of a name; ray for the routers that have announced
    themselves in the Ray cluster, as they do where this is set. Empty: router.host.
    """
    tls_directory: str = ""
    """Directory of ca.crt, tls.crt and tls.key, the same path on every host, made by disagg
    certificates create: mutual TLS on every gRPC port. disagg serve makes its own where it is not
    set. Without it ports are bound to loopback addresses only.
    """
    allow_insecure: bool = False
    """Bind gRPC ports to other addresses without certificates: whoever reaches them can register,
    open sessions, read and overwrite KV.
    """
    discovery_ms: Milliseconds = 5_000
    """Workers look the routers up again that often."""
    heartbeat_ms: Milliseconds = 1_000
    """Workers register again that often."""
    object_store_mib: int = Field(default=80, ge=76, le=1 << 20)
    """Ray's object store of a local cluster; KV never passes through it."""
    join_timeout_s: Seconds = 120
    """A Ray cluster that does not answer, or has gone, is waited for so long."""
    start_timeout_s: Seconds = 300
    stop_timeout_s: Seconds = 20

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hash_key and self.hash_key_file:
            raise ValueError("hash_key: there is cluster.hash_key_file already")
        if self.num_prefill + self.num_decode + self.num_both == 0:
            raise ValueError("num_prefill: there must be at least one worker")
        return self


class Settings(Section):
    """Everything that can be set. Built by :func:`disagg.config.read_settings`."""

    model: ModelSettings = ModelSettings()
    worker: WorkerSettings = WorkerSettings()
    cache: CacheSettings = CacheSettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    transfer: TransferSettings = TransferSettings()
    router: RouterSettings = RouterSettings()
    limits: LimitSettings = LimitSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    cluster: ClusterSettings = ClusterSettings()
    autoscale: AutoscaleSettings = AutoscaleSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.router.worker_silent_ms < 2 * self.cluster.heartbeat_ms:
            raise ValueError("router.worker_silent_ms: must be at least twice cluster.heartbeat_ms")
        if self.router.processes > 1 and self.router.processes >= self.worker.routers_max:
            # Those without a session would have no worker, and refuse what the kernel gives them;
            # one that takes another's place has one as well.
            raise ValueError(
                "router.processes: each has a session with every worker, and so has one that "
                "takes another's place: there must be fewer than worker.routers_max, "
                f"{self.worker.routers_max}"
            )
        if self.worker.kv_events_endpoint and not self.cache.prefix_caching:
            raise ValueError("worker.kv_events_endpoint: needs cache.prefix_caching")
        return self

    @staticmethod
    def secrets() -> frozenset[str]:
        """Dotted keys whose values are never printed."""
        return frozenset({"cluster.hash_key", "router.api_keys"})
