"""Whether what vLLM chose can compute a model, its kernels and its model code: before any step."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.worker.utils import select_common_block_size

from disagg.errors import ConfigError
from disagg.workers.engines.block_tokens import fitting_block_tokens
from disagg.workers.options import Auto


def block_tokens_of(layers: Mapping[str, Any], given: int | Auto) -> int | ConfigError:
    """Tokens of a block that every kernel for attention takes, or why not the given ones.

    Args:
        layers: vLLM's modules, by name; those of states take blocks of any size.
        given: ``worker.block_tokens``.
    """
    modules = [layer for layer in layers.values() if hasattr(layer, "get_attn_backend")]
    chosen = {module.get_attn_backend() for module in modules}
    backends = sorted((b for b in chosen if not b.is_ssm()), key=lambda b: str(b.get_name()))
    try:
        return fitting_block_tokens(
            given,
            lambda tokens: all(backend.supports_block_size(tokens) for backend in backends),
            "vLLM's " + " and ".join(str(backend.get_name()) for backend in backends),
            " and ".join(sorted({size for backend in backends for size in _sizes_of(backend)})),
        )
    except ConfigError as refused:
        return refused


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
        if not backend.supports_block_size(spec.block_size):  # the planned one may be larger
            return ConfigError(
                f"worker.block_tokens: vLLM's {backend.get_name()} takes"
                f" {', '.join(_sizes_of(backend))}, not {spec.block_size}",
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


def head_refusal_of(model: torch.nn.Module, config: Any) -> ConfigError | None:
    """Ask whether the logits come from the checkpoint's head, if it has one of its own.

    Some of vLLM's models (Cohere's) leave it out without a word and take the embeddings.

    Args:
        model: vLLM's, loaded.
        config: its ``ModelConfig``.
    """
    tied = (config.hf_config, config.hf_text_config)
    if any(getattr(each, "tie_word_embeddings", False) for each in tied):
        return None
    if any(isinstance(module, ParallelLMHead) for module in model.modules()):
        return None
    return ConfigError(
        f"vLLM's {type(model).__name__} takes the embeddings for the head, and the checkpoint has"
        " one of its own (tie_word_embeddings is false)",
        param="model",
    )


def _sizes_of(backend: Any) -> list[str]:
    return [
        f"multiples of {size.base}" if hasattr(size, "base") else str(size)
        for size in backend.get_supported_kernel_block_sizes()
    ]
