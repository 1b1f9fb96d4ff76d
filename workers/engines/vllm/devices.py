"""What differs between the CPU and CUDA under vLLM: environment, settings, refusals.

What of it was run on a GPU, and what was only read, is listed in docs/gpu.md.
"""

from collections.abc import Mapping
from typing import Any

import torch

from disagg.errors import ConfigError
from disagg.workers.options import WorkerOptions

GDN_HEAD_SIZE = 128
TAKES_STRIDES = {"CPU_ATTN"}
"""Backends that do not offer a form with all layers of a block together, and were found to read any
stride between blocks.
"""


def environment(device: str, num_threads: int) -> dict[str, str]:
    """What vLLM has to find when it is imported on a device."""
    if device != "cpu":
        # Its second model runner, the default there, takes other orders than those we give; the
        # first one is the same code as on the CPU.
        return {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    return {
        # vLLM finds the CPU by the name of its distribution, which is another one there.
        "VLLM_TARGET_DEVICE": "cpu",
        # It would bind its threads to cores of its choice, every worker's to the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(num_threads),
        # Of what `arguments` leaves uncompiled, a few functions of vLLM's would be all the same, in
        # the first step that needs them: ten seconds each, with the host's compiler.
        "TORCH_COMPILE_DISABLE": "1",
    }


def arguments(device: str, options: WorkerOptions) -> dict[str, Any]:
    """What vLLM is told on a device beside what it is told on every one."""
    return {
        # Compiled and captured in graphs, or operation by operation.
        "enforce_eager": device == "cpu" or not options.cuda_graphs,
        # Asked for before our own plan decides, of which vLLM knows nothing: almost none.
        "gpu_memory_utilization": 0.01,
        "kv_cache_memory_bytes": 1 << 20,
    }


def check_config(device: str, config: Any) -> None:
    """Refuse what cannot be run there, before a model is loaded.

    Args:
        device: ``cpu`` or ``cuda``.
        config: vLLM's, of the checkpoint and our settings.

    Raises:
        ConfigError: vLLM is built for another device; latent attention on the CPU; the second model
            runner is asked for.
    """
    found = config.device_config.device_type
    if found != device:
        raise ConfigError(
            f"worker.device={device}: the vLLM that is installed computes on {found}",
            param="worker.device",
        )
    if device == "cpu" and config.model_config.use_mla:
        refuse_latents()
    if config.use_v2_model_runner:
        raise ConfigError(
            "vLLM would take its second model runner, which is not driven here: unset"
            " VLLM_USE_V2_MODEL_RUNNER, and settings of vLLM that need it",
            param="worker.engine",
        )


def refuse_latents() -> None:
    """Refuse latent attention (MLA), before a model is loaded.

    Tried with DeepSeek-V3: both of vLLM's kernels (the reference, which also takes no chunks and
    no prefixes, and the one for AMX) give logprobs that are off by 0.5 and more, from the second
    position on.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "vLLM's CPU kernels compute latent attention (MLA) otherwise than the model's own code,"
        " and its reference kernel neither in chunks nor after a cached prefix; the native engine"
        " or a GPU has to run it",
        param="model",
    )


def refuse_on_cpu(specs: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Check what a model keeps against the kernels that there are.

    Raises:
        ConfigError: there is no kernel for it, or none in this arithmetic.
    """
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    states = {spec.mamba_type: spec for spec in specs.values() if hasattr(spec, "mamba_type")}
    for kind, spec in states.items():
        if kind is MambaAttentionBackendEnum.GDN_ATTN:
            _check_gdn(spec, dtype)
        elif kind is not MambaAttentionBackendEnum.MAMBA2:
            raise ConfigError(
                f"vLLM has no CPU kernel for {kind.name} layers; on the CPU it runs MAMBA2 and"
                " GDN_ATTN",
                param="model",
            )


def _check_gdn(spec: Any, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        raise ConfigError(
            "worker.dtype: vLLM's CPU kernels compute gated delta nets in bfloat16 only, not in"
            f" {str(dtype).removeprefix('torch.')}",
            param="worker.dtype",
        )
    sizes = set(spec.shapes[1][1:])  # [heads, value size, key size]
    if sizes != {GDN_HEAD_SIZE}:
        raise ConfigError(
            f"vLLM's CPU kernels compute gated delta nets of head size {GDN_HEAD_SIZE} only, the"
            f" model has {', '.join(map(str, sorted(sizes)))}",
            param="model",
        )
