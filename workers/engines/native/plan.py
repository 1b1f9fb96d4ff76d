"""What the native engine takes of its machine for a checkpoint."""

from dataclasses import dataclass

from disagg.workers.engine_plan import DTYPE_BYTES, MachinePlan, PoolPlan, plan_machine, plan_pool
from disagg.workers.engines.block_tokens import planned_block_tokens
from disagg.workers.engines.native.checkpoint import Checkpoint
from disagg.workers.options import WorkerOptions


@dataclass(frozen=True, slots=True)
class NativePlan:
    """What the engine is built with."""

    machine: MachinePlan
    pool: PoolPlan
    block_tokens: int

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
    block_tokens = planned_block_tokens("native", machine.device, options.block_tokens)
    limit = options.max_model_tokens or checkpoint.max_model_tokens
    pool = plan_pool(
        options,
        machine.device,
        checkpoint.layer_specs(block_tokens=block_tokens, dtype_bytes=dtype_bytes),
        max_model_tokens=min(limit, checkpoint.max_model_tokens),
        weight_bytes=(checkpoint.num_weights + _num_copied(checkpoint, machine)) * dtype_bytes,
    )
    return NativePlan(machine, pool, block_tokens)


def _num_copied(checkpoint: Checkpoint, machine: MachinePlan) -> int:
    """Weights that are in memory twice.

    Those of a head packed and, for the embeddings that are tied to it, plain; those of a projection
    from latents once more as decoding absorbs them, see `LatentProjection`.
    """
    config, num_copied = checkpoint.config, 0
    if machine.device == "cpu" and config.tie_word_embeddings:
        num_copied += checkpoint.vocab_size * config.hidden_size
    if "kv_lora_rank" in checkpoint.family.implements:
        size = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
        num_copied += config.num_hidden_layers * config.kv_lora_rank * size
    return int(num_copied)
