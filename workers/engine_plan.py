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

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from disagg.errors import ConfigError
from disagg.kv.kinds.kind import Spec
from disagg.kv.shapes.memory_plan import MemoryPlan, format_memory, plan_memory
from disagg.scheduling.admission import SHORTEST_TOKENS, refuse_too_few
from disagg.workers import machine
from disagg.workers.options import AUTO, Dtype, WorkerOptions

log = logging.getLogger(__name__)

CPU_ROOM_SHARE = 0.5
CPU_TOTAL_SHARE = 0.25
GPU_ROOM_SHARE = 0.9
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """Device, arithmetic and threads of an engine; decided before anything is loaded."""

    device: str
    dtype: Dtype
    num_threads: int
    summary: str


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The pool of an engine.

    Attributes:
        block_bytes: bytes of a KV block, all layers together.
        summary: it and what it was decided from, in one line.
    """

    num_blocks: int
    block_bytes: int
    summary: str


def plan_machine(options: WorkerOptions, stored_dtype: str) -> MachinePlan:
    """Decide what is ``auto`` of device, arithmetic and threads.

    Args:
        options: of the worker.
        stored_dtype: the type of the checkpoint's weights, by torch's name.

    Raises:
        ConfigError: an engine has no such arithmetic; ``param`` is the setting.
    """
    device = options.device
    if device == AUTO:
        device = "cuda" if machine.has_gpu() else "cpu"
    dtype = _known_dtype(stored_dtype) if options.dtype == AUTO else options.dtype
    cores = machine.num_cores()
    given = options.num_threads
    ranks = options.workers_per_host * options.tensor_parallel
    fair_threads = max(1, cores // ranks)
    num_threads = fair_threads if isinstance(given, str) else given
    threads = "threads" if num_threads > 1 else "thread"
    crowded = ""
    on_this_host = options.tensor_parallel_backend != "ray"
    if device == "cpu" and options.tensor_parallel > 1 and ranks > cores and on_this_host:
        crowded = (
            f"worker.tensor_parallel={options.tensor_parallel} is slow here: {ranks} ranks, which"
            f" wait for each other in every layer, share {cores} cores"
        )
        log.warning(crowded)
    return MachinePlan(
        device=device,
        dtype=dtype,
        num_threads=num_threads,
        summary=(
            f"{device}, {dtype}, {num_threads} {threads} ({cores} cores,"
            f" {options.workers_per_host} workers here)" + (f"; {crowded}" if crowded else "")
        ),
    )


def plan_pool(
    options: WorkerOptions,
    device: str,
    specs: Sequence[Spec | None],
    *,
    max_model_tokens: int,
    weight_bytes: int,
    weights_loaded: bool = False,
    whole_states: bool = False,
    memory: machine.Memory | None = None,
) -> PoolPlan:
    """Decide how many blocks the pool has, and check that it fits; takes milliseconds.

    Args:
        options: of the worker.
        device: where the pool will be.
        specs: what each layer keeps.
        max_model_tokens: bound on prompt plus generated tokens.
        weight_bytes: what the weights take there.
        weights_loaded: they are in memory already.
        whole_states: each layer's linear state lies within one block, see `plan_whole_states`.
        memory: of the device; None asks for that of this process's own.

    Raises:
        ConfigError: the pool does not fit, or could serve no request; ``param`` is the setting.
    """
    # Blocks and their bytes depend on the model alone: any budget gives them.
    whole = plan_memory(specs, 1 << 62, max_model_tokens, whole_states=whole_states)
    block_bytes = whole.layout.block_bytes
    most = 1 + options.max_sequences * whole.blocks_per_sequence
    memory = memory or machine.device_memory(device)
    budget = _Budget.of(options, device, memory, weight_bytes, weights_loaded)
    shortest = min(SHORTEST_TOKENS, max_model_tokens)
    least = plan_memory(specs, 1 << 62, shortest, whole_states=whole_states).blocks_per_sequence
    if isinstance(options.num_blocks, str):
        num_blocks = min(most, budget.pool_bytes // block_bytes)
        why = (
            f"auto: {options.max_sequences} sequences of {max_model_tokens:,} tokens fill them"
            if num_blocks == most
            else f"auto: {budget}"
        )
        if num_blocks <= least:
            raise ConfigError(
                f"worker.num_blocks: no memory is left for {least + 1} KV blocks of"
                f" {format_memory(block_bytes)}: {budget}",
                param="worker.num_blocks",
            )
    else:
        num_blocks, why = options.num_blocks, "given"
        refuse_too_few(num_blocks, least)
        if num_blocks * block_bytes > budget.room_bytes:
            raise ConfigError(
                f"worker.num_blocks: {num_blocks:,} blocks of {format_memory(block_bytes)} take"
                f" {format_memory(num_blocks * block_bytes)}, but {budget}: at most"
                f" {max(0, budget.room_bytes // block_bytes):,} fit",
                param="worker.num_blocks",
            )
    return PoolPlan(
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        summary=(
            f"{num_blocks:,} KV blocks of {format_memory(block_bytes)} ="
            f" {format_memory(num_blocks * block_bytes)} ({why})"
            f"{_raised(specs, whole)}"
        ),
    )


def _raised(specs: Sequence[Spec | None], plan: MemoryPlan) -> str:
    """What whole states cost, where they raise the block size."""
    block_tokens = max(spec.block_tokens for spec in specs if spec)
    planned = max(group.block_tokens for group in plan.groups)
    if planned == block_tokens:
        return ""
    share = max(group.padding_bytes for group in plan.groups) / plan.layout.block_bytes
    return (
        f" of {planned:,} tokens instead of {block_tokens}, as a layer's state lies in one block"
        f" (padding at most {share:.1%} of a block)"
    )


def _known_dtype(stored: str) -> Dtype:
    for dtype in DTYPE_BYTES:
        if stored == dtype:
            return dtype
    raise ConfigError(
        f"worker.dtype: the checkpoint's is {stored!r}; choose one of {', '.join(DTYPE_BYTES)}",
        param="worker.dtype",
    )


@dataclass(frozen=True, slots=True)
class _Budget:
    memory: machine.Memory
    weight_bytes: int
    weights_loaded: bool
    num_sharing: int
    where: Literal["the host", "the GPU"]
    num_ranks: int

    @classmethod
    def of(
        cls,
        options: WorkerOptions,
        device: str,
        memory: machine.Memory,
        weight_bytes: int,
        weights_loaded: bool,
    ) -> "_Budget":
        on_cpu = device == "cpu"
        return cls(
            memory,
            weight_bytes,
            weights_loaded,
            # Each rank has its own weights and pool: on the host beside those of the others.
            options.workers_per_host * options.tensor_parallel
            if on_cpu
            else options.workers_per_gpu,
            "the host" if on_cpu else "the GPU",
            options.tensor_parallel,
        )

    @property
    def share_bytes(self) -> int:
        return self.memory.total_bytes // self.num_sharing

    @property
    def room_bytes(self) -> int:
        """What a pool can take at most."""
        still_to_load = 0 if self.weights_loaded else self.weight_bytes
        return min(
            self.share_bytes - self.weight_bytes, self.memory.available_bytes - still_to_load
        )

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool where no setting fixes them."""
        if self.where == "the GPU":
            return int(self.room_bytes * GPU_ROOM_SHARE)
        return int(min(self.room_bytes * CPU_ROOM_SHARE, self.share_bytes * CPU_TOTAL_SHARE))

    def __str__(self) -> str:
        sharing = "workers" if self.num_ranks == 1 else "ranks"
        return (
            f"{self.where} has {format_memory(self.memory.total_bytes)} for {self.num_sharing}"
            f" {sharing}, {format_memory(self.memory.available_bytes)} available, and the weights"
            f" take {format_memory(self.weight_bytes)}"
        )
