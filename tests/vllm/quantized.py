"""A tiny checkpoint whose linear weights are 8-bit integers, and the same one without."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SCHEME: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": SCHEME | {"strategy": "channel", "dynamic": False},
            "input_activations": SCHEME | {"strategy": "token", "dynamic": True},
        }
    },
}
"""As compressed-tensors writes it: a scale per row of the weights, and per token."""


def quantize(directory: Path) -> Path:
    """Write ``directory`` anew with quantized weights; returns a copy with what they stand for."""
    plain = directory.parent / f"{directory.name}-plain"
    plain.mkdir()
    weights = load_file(directory / "model.safetensors")
    stored, meant = dict(weights), dict(weights)
    for name, weight in weights.items():
        if weight.dim() == 2 and name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            rounded = (weight / scale).round()
            stored[name] = rounded.to(torch.int8)
            stored[f"{name}_scale"] = scale
            meant[name] = rounded * scale
    for file in directory.iterdir():
        if file.name != "model.safetensors":
            (plain / file.name).write_bytes(file.read_bytes())
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"quantization_config": QUANTIZATION})
    )
    return plain
