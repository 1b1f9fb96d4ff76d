"""What the native engine takes of its machine for a checkpoint."""

from dataclasses import dataclass

from disagg.workers.engine_plan import DTYPE_BYTES, MachinePlan, PoolPlan, plan_machine, plan_pool
from disagg.workers.engines.native.checkpoint import Checkpoint
from disagg.workers.options import WorkerOptions


@dataclass(frozen=True, slots=True)
class NativePlan:
    """What the engine is built with."""

    machine: MachinePlan
    pool: PoolPlan

    @property
    def summary(self) -> str:
        """All of it in one line, with what was decided here and from what."""
        return f"{self.machine.summary}, {self.pool.summary}"


def plan_native(options: WorkerOptions, checkpoint: Checkpoint) -> NativePlan:
    """Decide what is ``auto`` and check that the pool fits; takes milliseconds.

    Raises:
        ConfigError: see `plan_machine` and `plan_pool`.
    """
    machine = plan_machine(options, checkpoint.dtype)
    dtype_bytes = DTYPE_BYTES[machine.dtype]
    limit = options.max_model_tokens or checkpoint.max_model_tokens
    pool = plan_pool(
        options,
        machine.device,
        checkpoint.layer_specs(block_tokens=options.block_tokens, dtype_bytes=dtype_bytes),
        max_model_tokens=min(limit, checkpoint.max_model_tokens),
        weight_bytes=(checkpoint.num_weights + _num_copied(checkpoint, machine)) * dtype_bytes,
    )
    return NativePlan(machine, pool)


def _num_copied(checkpoint: Checkpoint, machine: MachinePlan) -> int:
    """Weights that are in memory twice: packed for a head and plain for its tied embeddings."""
    config = checkpoint.config
    if machine.device != "cpu" or not config.tie_word_embeddings:
        return 0
    return int(checkpoint.vocab_size * config.hidden_size)
