"""A loader of exactly the checkpoint's weights, and of all of them.

vLLM's own does not ask whether layers that are not quantized were loaded (linear ones, experts,
embeddings, the head): what no tensor was for stays what the memory held before, and the model
answers with it. And it loads whatever safetensors files are in the directory, the last one to win.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from disagg.workers.engines.checkpoint_files import weight_files
from disagg.workers.engines.vllm.start import LOAD_FORMAT

NOT_ASKED = (UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod, UnquantizedLinearMethod)
NAMED_MAX = 5


@register_model_loader(LOAD_FORMAT)
class WholeWeightsLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's own, held to the files that the checkpoint's fingerprint covers."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))
        self._read = ""

    def _prepare_weights(self, model_dir: str, *source: Any) -> tuple[Any, ...]:
        """As vLLM's: folder, files, whether they are safetensors, and their index's name."""
        folder, files, *rest = super()._prepare_weights(model_dir, *source)
        if Path(folder) == Path(model_dir):  # else weights of a part, which a model looks for
            files = [str(file) for file in weight_files(Path(model_dir))]
        return folder, files, *rest

    def get_all_weights(self, *source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As vLLM's: names and tensors of the checkpoint, one after the other."""
        for name, tensor in super().get_all_weights(*source):
            self._read = f"{name} of shape {list(tensor.shape)}"
            yield name, tensor
        self._read = ""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load them; raises ValueError for what the checkpoint has nothing for.

        Also a part of one is seen: Q, K and V are one weight here, and all experts of a layer.
        """
        asked = dict(_not_asked(model))
        for weight in asked.values():
            weight.data.fill_(torch.nan)
        try:
            super().load_weights(model, model_config)
        except Exception as error:  # an assertion of a shape names no tensor
            if self._read:
                error.add_note(f"(the last tensor that was read: {self._read})")
            raise
        missing = [name for name, weight in asked.items() if torch.isnan(weight.amax())]
        if missing:
            more = f" and {len(missing) - NAMED_MAX} more" if len(missing) > NAMED_MAX else ""
            raise ValueError(
                "the checkpoint lacks weights, or has some that are no numbers, for"
                f" {', '.join(missing[:NAMED_MAX])}{more} (vLLM's names)"
            )


def _not_asked(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), NOT_ASKED):
            for own, weight in module.named_parameters(recurse=False):
                if weight.is_floating_point() and weight.numel() and not weight.is_meta:
                    yield f"{name}.{own}", weight
