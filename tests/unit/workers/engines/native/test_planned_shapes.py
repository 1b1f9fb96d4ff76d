"""What `disagg plan` reads from config.json is what the engine allocates."""

import json
from pathlib import Path

import pytest

from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.shapes.layout import plan_layout
from disagg.kv.shapes.model_shapes import read_shape
from disagg.workers.engines.native.checkpoint import open_checkpoint
from tests.checkpoints import edit_config, make_checkpoint
from tests.tiny_families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_is_the_engines_layout(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path / "model", family)
    checkpoint = open_checkpoint(path)
    config = json.loads((path / "config.json").read_text())
    shape = read_shape({**config, "dtype": "bfloat16"}, block_tokens=16)
    engine = checkpoint.layer_specs(block_tokens=16, dtype_bytes=2)
    assert shape.layer_specs == engine
    assert plan_layout(shape.layer_specs) == plan_layout(engine)
    assert shape.max_model_tokens == checkpoint.max_model_tokens


def test_heads_of_gemma_4_as_released_files_state_them(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gemma4", attention_k_eq_v=True, num_global_key_value_heads=1)
    stated = {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1}
    for fields in ({}, stated):
        edit_config(path, **fields)
        config = json.loads((path / "config.json").read_text())
        shape = read_shape({**config, "dtype": "bfloat16"}, block_tokens=16)
        engine = open_checkpoint(path).layer_specs(block_tokens=16, dtype_bytes=2)
        assert shape.layer_specs == engine
        assert engine[1] == FullAttentionSpec(16, 1, 32, 2)
