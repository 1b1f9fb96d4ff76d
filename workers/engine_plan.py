"""What a worker takes of its machine: device, arithmetic, threads, blocks; decided before it loads.

``auto`` is decided here. The pool's size goes by the arithmetic of ``disagg plan``:

- ``room`` is what is left for KV: the smaller of this worker's share of the memory (the total,
  divided among the workers of the host, or of the GPU) and what is available now, less the weights.
- On the CPU the pool takes half of the room and at most a quarter of the share: its pages are
  touched at the start, and programs beside it need memory too. On a GPU it takes nine tenths of
  the room; the rest is for activations.
- It never takes more than ``max_sequences`` sequences of ``max_model_tokens`` can fill.

Given numbers are taken as they are, if the pool fits into the room.
"""

from dataclasses import dataclass
from typing import Literal

from disagg.errors import ConfigError
from disagg.kv.shapes.memory_plan import format_memory, plan_memory
from disagg.workers import machine
from disagg.workers.engines.native.checkpoint import Checkpoint
from disagg.workers.options import AUTO, Dtype, WorkerOptions

CPU_ROOM_SHARE = 0.5
CPU_TOTAL_SHARE = 0.25
GPU_ROOM_SHARE = 0.9
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What the engine is built with.

    Attributes:
        max_model_tokens: bound on prompt plus generated tokens.
        block_bytes: bytes of a KV block, all layers together.
        summary: all of it in one line, with what was decided here and from what.
    """

    device: str
    dtype: Dtype
    num_threads: int
    num_blocks: int
    max_model_tokens: int
    block_bytes: int
    summary: str


def plan_engine(options: WorkerOptions, checkpoint: Checkpoint) -> EnginePlan:
    """Decide what is ``auto`` and check that the pool fits; takes milliseconds.

    Raises:
        ConfigError: the pool does not fit, or nothing is left for one; ``param`` is the setting.
    """
    device = options.device
    if device == AUTO:
        device = "cuda" if machine.has_gpu() else "cpu"
    dtype = _stored_dtype(checkpoint) if options.dtype == AUTO else options.dtype
    cores = machine.num_cores()
    given_threads, given_blocks = options.num_threads, options.num_blocks
    fair_threads = max(1, cores // options.workers_per_host)
    num_threads = fair_threads if isinstance(given_threads, str) else given_threads
    max_model_tokens = min(
        options.max_model_tokens or checkpoint.max_model_tokens, checkpoint.max_model_tokens
    )
    specs = checkpoint.layer_specs(
        block_tokens=options.block_tokens, dtype_bytes=DTYPE_BYTES[dtype]
    )
    # Blocks and their bytes depend on the model alone: any budget gives them.
    whole = plan_memory(specs, 1 << 62, max_model_tokens)
    block_bytes = whole.layout.block_bytes
    most = 1 + options.max_sequences * whole.blocks_per_sequence
    budget = _Budget.of(options, device, checkpoint.num_weights * DTYPE_BYTES[dtype])
    if isinstance(given_blocks, str):
        num_blocks = min(most, budget.pool_bytes // block_bytes)
        why = (
            f"auto: {options.max_sequences} sequences of {max_model_tokens:,} tokens fill them"
            if num_blocks == most
            else f"auto: {budget}"
        )
        if num_blocks < 2:
            raise ConfigError(
                f"worker.num_blocks: no memory is left for KV blocks of"
                f" {format_memory(block_bytes)}: {budget}",
                param="worker.num_blocks",
            )
    else:
        num_blocks, why = given_blocks, "given"
        if num_blocks * block_bytes > budget.room_bytes:
            raise ConfigError(
                f"worker.num_blocks: {num_blocks:,} blocks of {format_memory(block_bytes)} take"
                f" {format_memory(num_blocks * block_bytes)}, but {budget}: at most"
                f" {max(0, budget.room_bytes // block_bytes):,} fit",
                param="worker.num_blocks",
            )
    threads = "threads" if num_threads > 1 else "thread"
    return EnginePlan(
        device=device,
        dtype=dtype,
        num_threads=num_threads,
        num_blocks=num_blocks,
        max_model_tokens=max_model_tokens,
        block_bytes=block_bytes,
        summary=(
            f"{device}, {dtype}, {num_threads} {threads} ({cores} cores, {options.workers_per_host}"
            f" workers here), {num_blocks:,} KV blocks of {format_memory(block_bytes)} ="
            f" {format_memory(num_blocks * block_bytes)} ({why})"
        ),
    )


def _stored_dtype(checkpoint: Checkpoint) -> Dtype:
    for dtype in DTYPE_BYTES:
        if checkpoint.dtype == dtype:
            return dtype
    raise ConfigError(
        f"worker.dtype: the checkpoint's is {checkpoint.dtype!r}; choose one of"
        f" {', '.join(DTYPE_BYTES)}",
        param="worker.dtype",
    )


@dataclass(frozen=True, slots=True)
class _Budget:
    memory: machine.Memory
    weight_bytes: int
    num_sharing: int
    where: Literal["the host", "the GPU"]

    @classmethod
    def of(cls, options: WorkerOptions, device: str, weight_bytes: int) -> "_Budget":
        on_cpu = device == "cpu"
        return cls(
            machine.device_memory(device),
            weight_bytes,
            options.workers_per_host if on_cpu else options.workers_per_gpu,
            "the host" if on_cpu else "the GPU",
        )

    @property
    def share_bytes(self) -> int:
        return self.memory.total_bytes // self.num_sharing

    @property
    def room_bytes(self) -> int:
        """What a pool can take at most."""
        return min(self.share_bytes, self.memory.available_bytes) - self.weight_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool where no setting fixes them."""
        if self.where == "the GPU":
            return int(self.room_bytes * GPU_ROOM_SHARE)
        return int(min(self.room_bytes * CPU_ROOM_SHARE, self.share_bytes * CPU_TOTAL_SHARE))

    def __str__(self) -> str:
        return (
            f"{self.where} has {format_memory(self.memory.total_bytes)} for"
            f" {self.num_sharing} workers, {format_memory(self.memory.available_bytes)} available,"
            f" and the weights take {format_memory(self.weight_bytes)}"
        )
