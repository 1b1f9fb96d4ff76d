"""The engine over vLLM's model runner: our layout, our block tables, our sampler."""

from collections.abc import Mapping
from typing import Any

import torch

from disagg.errors import ConfigError
from disagg.kv.shapes.layout import KVCacheLayout, plan_layout
from disagg.scheduling.block_tables import BlockTables
from disagg.scheduling.step import Step, StepResult
from disagg.workers.engine_plan import DTYPE_BYTES, PoolPlan, plan_machine, plan_pool
from disagg.workers.engines.checkpoint_files import model_fingerprint, read_weights
from disagg.workers.engines.sampler import NonFiniteError
from disagg.workers.engines.vllm import start
from disagg.workers.options import WorkerOptions
from disagg.workers.pool_region import PoolRegion


class VllmEngine:
    """See `Engine`. The runner holds the sequences that run and nothing of those that do not.

    What breaks the runner's batch is checked before the call; an exception inside it ends the
    process.

    Attributes:
        pool: int8 [num_blocks, block_bytes], the runner's own storage.
    """

    def __init__(self, options: WorkerOptions) -> None:
        """Load the model and allocate the pool.

        Raises:
            ConfigError: vLLM is not there, or refuses the checkpoint or a setting.
        """
        version = start.check_release()
        num_weights, stored_dtype = read_weights(options.model_dir)
        self.fingerprint = model_fingerprint(options.model_dir)
        machine = plan_machine(options, stored_dtype)
        self.dtype = machine.dtype
        start.set_environment(machine.device, machine.num_threads)
        executor = start.start_executor(options, machine.dtype)
        config = executor.vllm_config
        self.max_model_tokens = config.model_config.max_model_len
        self.vocab_size = config.model_config.get_vocab_size()
        self._max_step_tokens, self._max_sequences = options.max_step_tokens, options.max_sequences
        # vLLM can be imported from here on.
        from disagg.workers.engines.vllm.kv_layout import spec_of
        from disagg.workers.engines.vllm.runner import Runner
        from disagg.workers.engines.vllm.runner_batch import RunnerBatch

        (specs,) = executor.get_kv_cache_specs()
        ours = [spec_of(name, spec) for name, spec in specs.items()]
        pool = plan_pool(
            options,
            machine.device,
            ours,
            max_model_tokens=self.max_model_tokens,
            weight_bytes=num_weights * DTYPE_BYTES[machine.dtype],
            weights_loaded=True,
        )
        self.layout: KVCacheLayout = plan_layout(ours)
        self._runner = Runner(executor)
        self.pool = self._allocate(executor, specs, pool)
        self.region = PoolRegion(
            address=self.pool.data_ptr(),
            num_blocks=pool.num_blocks,
            block_bytes=pool.block_bytes,
            memory_kind="VRAM" if self.pool.is_cuda else "DRAM",
            device_id=self.pool.get_device() if self.pool.is_cuda else 0,
            owner=(executor, self.pool),
        )
        self.summary = f"vllm {version}: {machine.summary}, {pool.summary}"
        self._tables = BlockTables(len(self.layout.groups), pool.num_blocks)
        self._batch = RunnerBatch([group.spec.block_tokens for group in self.layout.groups])

    def run(self, step: Step) -> StepResult:
        """Compute a step; blocks until it is done. See `RunsSteps`."""
        try:
            self._tables.apply(step)
            self._check(step)
        except ValueError as error:
            return StepResult(step.step_id, error=str(error))
        order = self._batch.describe(step, self._tables)
        slices = self._batch.names_of(step)
        try:
            with torch.inference_mode():
                drawn = self._runner.run(order, slices)
        except NonFiniteError as error:
            return StepResult(step.step_id, error=f"{type(error).__name__}: {error}")
        return StepResult(step.step_id, tuple(drawn.get(name) for name in slices))

    def _allocate(self, executor: Any, specs: Mapping[str, Any], plan: PoolPlan) -> torch.Tensor:
        from disagg.workers.engines.vllm.kv_layout import kv_cache_config

        (forms, *_) = executor.get_supported_kv_cache_layouts()
        config = kv_cache_config(self.layout, specs, plan.num_blocks)
        config.kv_cache_layout = forms[0]
        executor.set_kv_cache_layout(forms[0])
        cache = executor.vllm_config.cache_config
        cache.kv_cache_layout, cache.num_gpu_blocks = forms[0], plan.num_blocks
        executor.initialize_from_config([config])
        executor.collective_rpc("compile_or_warm_up_model")
        memory = self._runner.pool_of(list(specs))
        if memory.numel() != plan.num_blocks * plan.block_bytes:
            raise ConfigError(
                f"vLLM allocated {memory.numel()} bytes for {plan.num_blocks} blocks of"
                f" {plan.block_bytes}",
                param="worker.engine",
            )
        return memory.view(plan.num_blocks, plan.block_bytes)

    def _check(self, step: Step) -> None:
        """Refuse what would leave the runner's batch broken."""
        num_tokens = sum(len(part.token_ids) for part in step.slices)
        if not 0 < num_tokens <= self._max_step_tokens or len(step.slices) > self._max_sequences:
            raise ValueError(
                f"{len(step.slices)} slices of {num_tokens} tokens: at most"
                f" {self._max_sequences} of {self._max_step_tokens} can be computed"
            )
        for index, part in enumerate(step.slices):
            end = part.start + len(part.token_ids)
            if not len(part.token_ids) or part.start < 0 or end > self.max_model_tokens:
                raise ValueError(
                    f"slice {index}: positions {part.start}..{end} do not lie in"
                    f" 0..{self.max_model_tokens}, or are none"
                )
            if min(part.token_ids) < 0 or max(part.token_ids) >= self.vocab_size:
                raise ValueError(f"slice {index}: token id out of 0..{self.vocab_size - 1}")


def build_vllm(options: WorkerOptions) -> VllmEngine:
    """The vLLM engine, as large as its machine and its options let it be."""
    return VllmEngine(options)
