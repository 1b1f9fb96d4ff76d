"""The engine over vLLM's model runner: our layout, our block tables, our sampler."""

import torch

from disagg.kv.shapes.layout import KVCacheLayout, plan_layout
from disagg.scheduling.block_tables import BlockTables
from disagg.scheduling.step import Step, StepResult
from disagg.workers.engines.sampler import NonFiniteError
from disagg.workers.pool_region import PoolRegion


class VllmEngine:
    """See `Engine`. The runner holds the sequences that run; the pool is ours to describe."""

    def __init__(
        self,
        model_dir: str,
        *,
        num_blocks: int,
        block_tokens: int = 32,
        dtype: str = "float32",
        device: str = "cpu",
        num_threads: int = 1,
        max_sequences: int = 64,
        max_step_tokens: int = 512,
        max_model_tokens: int = 0,
        summary: str = "",
    ) -> None:
        from disagg.workers.engines.vllm import start

        start.check_release()
        start.set_environment(device, num_threads)
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs  # noqa: F401

        from disagg.workers.engines.native.checkpoint import model_fingerprint
        from disagg.workers.engines.vllm.kv_layout import kv_cache_config, spec_of
        from disagg.workers.engines.vllm.runner import Runner
        from disagg.workers.engines.vllm.runner_batch import RunnerBatch

        self.fingerprint = model_fingerprint(model_dir)
        self.dtype, self.summary = dtype, summary
        self.max_model_tokens = max_model_tokens
        self._limits = (max_step_tokens, max_sequences)
        executor = start.start_executor(
            model_dir,
            dtype=dtype,
            block_tokens=block_tokens,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            max_model_tokens=max_model_tokens,
        )
        config = executor.vllm_config
        (specs,) = executor.get_kv_cache_specs()
        form = executor.get_supported_kv_cache_layouts()[0][0]
        executor.set_kv_cache_layout(form)
        config.cache_config.kv_cache_layout = form
        self.layout: KVCacheLayout = plan_layout(
            [spec_of(name, spec) for name, spec in specs.items()]
        )
        kv = kv_cache_config(self.layout, specs, num_blocks)
        kv.kv_cache_layout = form
        config.cache_config.num_gpu_blocks = num_blocks
        executor.initialize_from_config([kv])
        executor.collective_rpc("compile_or_warm_up_model")
        self._executor = executor
        self._runner = Runner(executor)
        memory = self._runner.pool_of(list(specs))
        pool = memory.view(num_blocks, self.layout.block_bytes)
        self.region = PoolRegion(
            pool.data_ptr(),
            num_blocks,
            self.layout.block_bytes,
            "VRAM" if pool.is_cuda else "DRAM",
            pool.get_device() if pool.is_cuda else 0,
            pool,
        )
        self.pool = pool
        self._tables = BlockTables(len(self.layout.groups), num_blocks)
        self._batch = RunnerBatch([group.spec.block_tokens for group in self.layout.groups])

    def run(self, step: Step) -> StepResult:
        try:
            self._tables.apply(step)
            self._check(step)
        except ValueError as error:
            return StepResult(step.step_id, error=str(error))
        from disagg.workers.engines.vllm.runner_batch import name_of

        order = self._batch.describe(step, self._tables)
        slices = {name_of(part.key): part for part in step.slices}
        try:
            with torch.inference_mode():
                drawn = self._runner.run(order, slices)
        except NonFiniteError as error:
            return StepResult(step.step_id, error=f"NonFiniteError: {error}")
        return StepResult(step.step_id, tuple(drawn.get(name) for name in slices))

    def _check(self, step: Step) -> None:
        """Refuse what would leave the runner's batch broken."""
        tokens = sum(len(part.token_ids) for part in step.slices)
        if tokens > self._limits[0] or len(step.slices) > self._limits[1] or not step.slices:
            raise ValueError(
                f"{len(step.slices)} slices of {tokens} tokens: at most {self._limits}"
            )
