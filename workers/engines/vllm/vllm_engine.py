"""The engine over vLLM's model runner: our layout, our block tables, our sampler."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from disagg.kv.kinds.kind import keeps_states
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout
from disagg.kv.shapes.whole_states import plan_whole_states
from disagg.messages.forms import GroupForm, Section
from disagg.scheduling.block_tables import BlockTables
from disagg.scheduling.engine_steps import EngineSteps, SliceSamples
from disagg.scheduling.step import Step, StepResult
from disagg.workers.engine_plan import DTYPE_BYTES, PoolPlan, plan_machine, plan_pool
from disagg.workers.engines.checkpoint_files import model_fingerprint, read_weights
from disagg.workers.engines.finite import NonFiniteError
from disagg.workers.engines.forms import group_forms
from disagg.workers.engines.protocol import Drafts, EngineFailedError
from disagg.workers.engines.start_phases import phase
from disagg.workers.engines.vllm import start
from disagg.workers.engines.vllm.block_changes import BlockChanges, fresh_blocks, state_copies
from disagg.workers.engines.vllm.step_checks import StepChecks
from disagg.workers.options import WorkerOptions

if TYPE_CHECKING:  # at run time vLLM is imported when the engine starts
    from vllm.v1.core.sched.output import SchedulerOutput

    from disagg.workers.engines.vllm.kv_layout import RankHeads
    from disagg.workers.engines.vllm.runner import Runner


class VllmEngine:
    """See `Engine`. The runner holds the sequences that run and nothing of those that do not.

    What breaks the runner's batch is checked before the call; an exception inside it, or while it
    is described, ends the process. It computes no drafts, and vLLM's proposers are not started.
    """

    drafts = Drafts()

    def __init__(self, options: WorkerOptions, why: str = "") -> None:
        """Load the model and allocate the pool.

        Args:
            options: of the worker.
            why: this engine was chosen; for the summary.

        Raises:
            ConfigError: vLLM is not there, or refuses the checkpoint or a setting.
        """
        version = start.check_release()
        weights = read_weights(options.model_dir)
        self.fingerprint = model_fingerprint(options.model_dir)
        machine = plan_machine(options, weights.dtype)
        self.dtype = machine.dtype
        weight_bytes = weights.bytes_in(DTYPE_BYTES[machine.dtype]) // options.tensor_parallel
        self._threads = start.Threads(machine.num_threads)
        start.set_environment(machine.device, machine.num_threads)
        with phase("imports of vLLM", machine.device):
            start.import_vllm()
        executor = start.start_executor(options, machine.device, machine.dtype, weight_bytes)
        config = executor.vllm_config
        self.max_model_tokens = config.model_config.max_model_len
        # vLLM can be imported from here on.
        from disagg.workers.engines.vllm.devices import refuse_on_cpu
        from disagg.workers.engines.vllm.executors import rank_host
        from disagg.workers.engines.vllm.kv_layout import RankHeads, spec_of
        from disagg.workers.engines.vllm.rank import Ranks
        from disagg.workers.engines.vllm.runner_batch import RunnerBatch

        self._ranks = ranks = Ranks(executor, options.tensor_parallel, rank_host(options))
        block_tokens = ranks.choose_block_tokens(options.block_tokens)
        specs = ranks.read_specs(block_tokens)
        if machine.device == "cpu":
            refuse_on_cpu(specs, config.model_config.dtype)
        ours = [spec_of(name, spec, block_tokens) for name, spec in specs.items()]
        self.layout: KVCacheLayout = plan_whole_states(ours)
        specs = ranks.read_specs(max(group.spec.block_tokens for group in self.layout.groups))
        ranks.check(specs)
        pool = plan_pool(
            options,
            machine.device,
            ours,
            max_model_tokens=self.max_model_tokens,
            weight_bytes=weight_bytes,
            weights_loaded=True,
            whole_states=True,
            memory=ranks.memory(),
        )
        form, parts = self._allocate(executor, specs, pool)
        executor.collective_rpc("compile_or_warm_up_model")  # with vLLM's own sampler
        page_format = ranks.attach(list(specs), pool.num_blocks, pool.block_bytes, parts)
        self.page_format = f"vllm {start.RELEASE} {page_format}"
        num_kv_heads = config.model_config.get_total_num_kv_heads()
        self.forms = self._forms(list(specs), form, parts, RankHeads(ranks.num_ranks, num_kv_heads))
        self.region = ranks.region
        because = f" ({why})" if why else ""
        self.summary = f"vllm {version}{because}: {machine.summary}, {pool.summary}"
        self._steps = EngineSteps(self._lay_out, self._compute, (ValueError, NonFiniteError))
        self._tables = BlockTables(len(self.layout.groups), pool.num_blocks)
        self._checks = StepChecks(
            [group.spec for group in self.layout.groups],
            max_step_tokens=options.max_step_tokens,
            max_sequences=options.max_sequences,
            max_model_tokens=self.max_model_tokens,
            vocab_size=config.model_config.get_vocab_size(),
        )
        self.batch = RunnerBatch(self.layout)
        self._failed = ""

    def prepare(self, step: Step) -> None:
        """Make the step's table changes, check it, describe it. See `RunsSteps`."""
        if self._failed:
            raise EngineFailedError(self._failed)
        self._steps.prepare(step)

    def run(self, step: Step) -> StepResult:
        """Compute a step; blocks until it is done. See `RunsSteps`."""
        if self._failed:
            raise EngineFailedError(self._failed)
        return self._steps.run(step)

    def _lay_out(self, step: Step) -> "tuple[SchedulerOutput, BlockChanges]":
        self._tables.apply(step)
        self.batch.forget(step.ended)
        self._checks.check(step, self._tables, self.batch)
        with self._ends_if_it_fails():
            changes = BlockChanges(
                # vLLM's kernels need finite bytes in slots that nobody has written.
                zeroed=fresh_blocks(step, self._tables, self.layout),
                copied=state_copies(step, self._tables, self.layout),
            )
            return self.batch.describe(step, self._tables), changes

    def _compute(
        self, laid_out: "tuple[SchedulerOutput, BlockChanges]", step: Step
    ) -> tuple[SliceSamples, ...]:
        self._threads.use()
        order, changes = laid_out
        with self._ends_if_it_fails():
            slices = self.batch.names_of(step)
            self.batch.complete(order, slices, step.ended)
            drawn, not_finite = self._ranks.run(order, slices, changes)
        if not_finite:
            raise NonFiniteError(not_finite)
        return tuple(drawn.get(name) for name in slices)

    @contextmanager
    def _ends_if_it_fails(self) -> Iterator[None]:
        """What the runner holds is not known any more."""
        try:
            yield
        except Exception as failure:
            self._failed = f"vLLM's runner failed: {type(failure).__name__}: {failure}"
            raise EngineFailedError(self._failed) from failure

    @property
    def runner(self) -> "Runner":
        """The runner of an engine of one rank."""
        return self._ranks.runner

    @property
    def pool(self) -> torch.Tensor:
        """Of an engine of one rank, see `Runner`."""
        return self._ranks.runner.pool

    def _forms(
        self, layers: Sequence[str], form: str, num_parts: int, heads: "RankHeads"
    ) -> tuple[GroupForm, ...]:
        from disagg.workers.engines.vllm.kv_layout import sections_of

        def sections(group: KVCacheGroup) -> tuple[Section, ...]:
            paged = () if keeps_states(group.spec) else [layers[n] for n in group.layers]
            backends = self._ranks.backends(paged)
            return sections_of(group, form, num_parts, backends, heads)

        return group_forms(self.layout, sections)

    def _allocate(self, executor: Any, specs: Mapping[str, Any], plan: PoolPlan) -> tuple[str, int]:
        """Returns how the pool lies: its form, and in how many parts a block lies."""
        from disagg.workers.engines.vllm.kv_layout import choose_form, kv_cache_config

        names = list(specs)
        paged = [group for group in self.layout.groups if not keeps_states(group.spec)]
        backends = self._ranks.backends([names[n] for group in paged for n in group.layers])
        (forms, *_) = executor.get_supported_kv_cache_layouts()
        whole_blocks = self._ranks.takes_whole_blocks(specs)
        form, parts = choose_form(self.layout, forms, backends, whole_blocks)
        config = kv_cache_config(self.layout, specs, plan.num_blocks, parts)
        config.kv_cache_layout = form
        executor.set_kv_cache_layout(form)
        cache = executor.vllm_config.cache_config
        cache.kv_cache_layout, cache.num_gpu_blocks = form, plan.num_blocks
        executor.initialize_from_config([config] * self._ranks.num_ranks)
        return form, parts


def build_vllm(options: WorkerOptions, why: str = "") -> VllmEngine:
    """The vLLM engine, as large as its machine and its options let it be."""
    return VllmEngine(options, why)
