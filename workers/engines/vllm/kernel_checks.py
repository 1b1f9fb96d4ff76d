"""Whether the kernels that vLLM chose can compute a model's attention: asked before any step."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.worker.utils import select_common_block_size

from disagg.errors import ConfigError


def refusal_of(layers: Mapping[str, Any], specs: Mapping[str, Any]) -> ConfigError | None:
    """Ask each attention layer's backend about its heads and blocks.

    What it has no kernel for vLLM itself would find in the first step.

    Args:
        layers: vLLM's modules, by name.
        specs: what each keeps.
    """
    for name, spec in specs.items():
        if not hasattr(spec, "head_size"):
            continue
        backend = layers[name].get_attn_backend()
        if not backend.supports_head_size(spec.head_size):
            return ConfigError(
                f"vLLM's {backend.get_name()} has no kernel for heads of {spec.head_size}; it has"
                f" them for {', '.join(map(str, backend.get_supported_head_sizes()))}",
                param="model",
            )
        if not backend.supports_block_size(spec.block_size):
            sizes = [
                f"multiples of {size.base}" if hasattr(size, "base") else str(size)
                for size in backend.get_supported_kernel_block_sizes()
            ]
            return ConfigError(
                f"worker.block_tokens: vLLM's {backend.get_name()} takes {', '.join(sizes)}, not"
                f" {spec.block_size}",
                param="worker.block_tokens",
            )
    return None


def takes_whole_blocks(layers: Mapping[str, Any], specs: Mapping[str, Any]) -> bool:
    """Whether every attention kernel computes blocks of our size, not several to one of ours."""
    return all(
        select_common_block_size(spec.block_size, [layers[name].get_attn_backend()], [spec])
        == spec.block_size
        for name, spec in specs.items()
        if hasattr(spec, "head_size")
    )
