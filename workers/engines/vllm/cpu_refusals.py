"""What vLLM's CPU kernels cannot compute, refused by name at the start and not in a step."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from disagg.errors import ConfigError

GDN_HEAD_SIZE = 128


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
