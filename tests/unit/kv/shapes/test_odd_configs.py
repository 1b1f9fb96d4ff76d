"""Fields of config.json that hold something else: refused by name, whatever the family."""

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.kv.shapes.model_shapes import read_shape

CONFIGS = Path(__file__).parents[3] / "data" / "model_configs"
ODD = ["many", float("nan"), float("inf"), 2.5, [None], [["x"]], {"a": 1}, True, -1]


def _with(field: str, value: object) -> dict[str, Any]:
    config = json.loads((CONFIGS / "gemma-3-27b.json").read_text())
    (config.get("text_config") or config).update({field: value})
    return dict(config)


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize(
    "field", ["head_dim", "num_hidden_layers", "layer_types", "sliding_window", "dtype"]
)
def test_a_field_of_another_type_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_shape(_with(field, value))
    assert caught.value.param == field


@pytest.mark.parametrize("value", [one for one in ODD if not isinstance(one, dict)])
def test_a_text_part_that_is_no_object(value: object) -> None:
    with pytest.raises(ConfigError, match="text_config is not an object"):
        read_shape({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": value})


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        ("Gemma3nForCausalLM", "num_kv_shared_layers"),
        ("Gemma4ForCausalLM", "per_layer_config"),
        ("Llama4ForCausalLM", "no_rope_layers"),
        ("BambaForCausalLM", "attn_layer_indices"),
        ("FalconH1ForCausalLM", "mamba_d_ssm"),
    ],
)
@pytest.mark.parametrize("value", ["many", float("nan"), [None], {"a": 1}])
def test_what_only_some_families_read(architecture: str, field: str, value: object) -> None:
    config = {
        "architectures": [architecture],
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "hidden_size": 64,
        field: value,
    }
    with pytest.raises(ConfigError) as caught:
        read_shape(config)
    assert caught.value.param == field
