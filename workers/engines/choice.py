"""Which engine computes a worker's steps, and why."""

import logging

from disagg.errors import ConfigError
from disagg.workers import machine
from disagg.workers.engines.native.checkpoint import open_checkpoint
from disagg.workers.engines.native.native_engine import NativeEngine
from disagg.workers.engines.native.plan import plan_native
from disagg.workers.engines.protocol import Engine
from disagg.workers.engines.vllm.start import installed_release
from disagg.workers.options import AUTO, WorkerOptions

log = logging.getLogger(__name__)


def build_engine(options: WorkerOptions) -> Engine:
    """Load the model into the engine that the options name, or that fits.

    Raises:
        ConfigError: no engine runs the checkpoint, with the reason of each; or a setting of the
            one that does cannot be used.
    """
    name, why = choose(options)
    log.info("worker %s takes the %s engine: %s", options.worker_id, name, why)
    if name == "native":
        return build_native(options)
    from disagg.workers.engines.vllm.vllm_engine import build_vllm  # vLLM is an extra

    return build_vllm(options)


def choose(options: WorkerOptions) -> tuple[str, str]:
    """Return the engine's name and the reason.

    Raises:
        ConfigError: native does not know the model and vLLM is not installed.
    """
    if options.engine != AUTO:
        return options.engine, "worker.engine names it"
    has_vllm = bool(installed_release())
    on_gpu = options.device == "cuda" or (options.device == AUTO and machine.has_gpu())
    if has_vllm and on_gpu:
        return "vllm", "the device is a GPU and vLLM is installed"
    try:
        open_checkpoint(options.model_dir)
    except ConfigError as refused:
        if refused.param == "model":
            raise  # there is no checkpoint
        if not has_vllm:
            raise ConfigError(
                f"the native engine: {refused.message}; the vllm engine: not installed",
                param=refused.param,
            ) from refused
        return "vllm", f"native refuses the model ({refused.message})"
    return "native", "it knows the model" + (", and the device is no GPU" if has_vllm else "")


def build_native(options: WorkerOptions) -> Engine:
    """The native engine, as large as its machine and its options let it be."""
    plan = plan_native(options, open_checkpoint(options.model_dir))
    return NativeEngine(
        options.model_dir,
        num_blocks=plan.pool.num_blocks,
        block_tokens=options.block_tokens,
        dtype=plan.machine.dtype,
        device=plan.machine.device,
        num_threads=plan.machine.num_threads,
        summary=f"native: {plan.summary}",
    )
