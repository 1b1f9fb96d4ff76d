"""Which engine computes a worker's steps, and why."""

import logging
from dataclasses import dataclass

from disagg.errors import ConfigError
from disagg.workers import machine
from disagg.workers.engines.checkpoint_files import check_files
from disagg.workers.engines.freed_memory import keep_freed_memory
from disagg.workers.engines.native.checkpoint import open_checkpoint
from disagg.workers.engines.native.plan import plan_native
from disagg.workers.engines.protocol import Engine
from disagg.workers.engines.vllm import start
from disagg.workers.options import AUTO, WorkerOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine by name.

    Attributes:
        why: it was chosen.
        without: what the other engine says, if this one refuses the model as well.
    """

    name: str
    why: str
    without: str = ""


def build_engine(options: WorkerOptions) -> Engine:
    """Load the model into the engine that the options name, or that fits.

    Raises:
        ConfigError: no engine runs the checkpoint, with the reason of each; or a setting of the
            one that does cannot be used.
    """
    choice = choose(options)
    keep_freed_memory()
    log.info("worker %s takes the %s engine: %s", options.worker_id, choice.name, choice.why)
    if choice.name == "native":
        return build_native(options, choice.why)
    from disagg.workers.engines.vllm.vllm_engine import build_vllm  # vLLM is an extra

    try:
        return build_vllm(options, choice.why)
    except ConfigError as refused:
        if not choice.without:
            raise
        raise ConfigError(
            f"the vllm engine: {refused.message}; the native engine: {choice.without}",
            param=refused.param,
        ) from refused


def choose(options: WorkerOptions) -> Choice:
    """Choose by the settings, the machine and the checkpoint.

    Raises:
        ConfigError: a file is missing or damaged; native does not know the model and vLLM cannot
            be had; or an engine is asked for that lacks what a setting needs.
    """
    choice = _choose(options)
    if options.num_speculative_tokens and choice.name == "vllm":
        raise ConfigError(
            f"scheduling.num_speculative_tokens={options.num_speculative_tokens}: the vllm engine "
            f"computes no drafts, and {choice.why}",
            param="scheduling.num_speculative_tokens",
        )
    return choice


def _choose(options: WorkerOptions) -> Choice:
    for name, asked, lacks in (
        ("tensor_parallel", options.tensor_parallel > 1, "has one rank"),
        ("kv_dtype", options.kv_dtype != AUTO, "keeps KV in worker.dtype"),
    ):
        if asked and options.engine == "native":
            raise ConfigError(
                f"worker.{name}={getattr(options, name)}: the native engine {lacks}",
                param=f"worker.{name}",
            )
        if asked:
            return Choice("vllm", f"worker.{name}={getattr(options, name)} asks for it")
    if options.engine != AUTO:
        return Choice(options.engine, "worker.engine names it")
    if options.num_speculative_tokens:
        return Choice("native", "scheduling.num_speculative_tokens asks for it")
    check_files(options.model_dir)  # what is missing or damaged is so for either
    no_vllm = start.why_not()
    refusal = _refusal_of_native(options.model_dir)
    on_gpu = options.device == "cuda" or (options.device == AUTO and machine.has_gpu())
    if on_gpu and not no_vllm:
        without = refusal.message if refusal else "would run it (worker.engine=native)"
        return Choice("vllm", "the device is a GPU and vLLM is installed", without)
    if refusal is None:
        return Choice("native", "it knows the model; " + (no_vllm or "the device is no GPU"))
    if no_vllm:
        raise ConfigError(
            f"the native engine: {refusal.message}; the vllm engine: {no_vllm}",
            param=refusal.param,
        )
    return Choice("vllm", f"native refuses the model: {refusal.message}", refusal.message)


def build_native(options: WorkerOptions, why: str = "") -> Engine:
    """The native engine, as large as its machine and its options let it be."""
    # Its model code takes seconds and 100 MiB, also of a worker that computes with another engine.
    from disagg.workers.engines.native.native_engine import NativeEngine

    plan = plan_native(options, open_checkpoint(options.model_dir))
    because = f" ({why})" if why else ""
    return NativeEngine(
        options.model_dir,
        num_blocks=plan.pool.num_blocks,
        block_tokens=plan.block_tokens,
        dtype=plan.machine.dtype,
        device=plan.machine.device,
        num_threads=plan.machine.num_threads,
        num_speculative_tokens=options.num_speculative_tokens,
        summary=f"native{because}: {plan.summary}",
    )


def _refusal_of_native(model_dir: str) -> ConfigError | None:
    """Why the native engine cannot run a checkpoint whose files are whole."""
    try:
        open_checkpoint(model_dir)
    except ConfigError as refused:
        return refused
    return None
