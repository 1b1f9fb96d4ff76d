"""A checkpoint is opened, described, fingerprinted, or refused with the field at fault."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from disagg.errors import ConfigError
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.workers.engines.checkpoint_files import model_fingerprint
from disagg.workers.engines.native.checkpoint import open_checkpoint
from disagg.workers.engines.native.families import SUPPORTED
from disagg.workers.engines.native.native_engine import NativeEngine
from tests.checkpoints import edit_config, make_checkpoint, make_no_file


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def refusal(directory: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(directory)
    return caught.value


def test_describes_a_hybrid_model(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    assert checkpoint.family.name == "gemma3"
    assert checkpoint.vocab_size == 320
    assert checkpoint.max_model_tokens == 4096
    assert checkpoint.eos_token_ids == (2, 6)
    window, full = SlidingWindowSpec(16, 2, 16, 2, 32), FullAttentionSpec(16, 2, 16, 2)
    specs: list[Spec] = [*[window] * 5, full]
    assert checkpoint.layer_specs(block_tokens=16, dtype_bytes=2) == tuple(specs)
    assert checkpoint.kv_owners == {}


def test_without_generation_config_the_config_names_eos(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    assert open_checkpoint(directory).eos_token_ids == (2,)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_missing_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    error = refusal(directory)
    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "directory"])
def test_what_is_no_file_is_refused_by_name(directory: Path, name: str, kind: str) -> None:
    make_no_file(directory, kind, name)
    assert refusal(directory).param == name


def test_weights_in_pytorchs_own_format_are_told_from_none(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    message = refusal(directory).message
    assert "PyTorch's own format alone (pytorch_model.bin)" in message
    assert "save_pretrained" in message
    (directory / "pytorch_model.bin").unlink()
    assert "holds neither model.safetensors" in refusal(directory).message


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent").param == "model"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"architectures": 3}, "architectures"),
        ({"text_config": ["x"]}, "text_config"),
        ({"attention_chunk_size": 64}, "attention_chunk_size"),
        ({"attn_temperature_tuning": True}, "attn_temperature_tuning"),
        ({"kv_lora_rank": 8}, "kv_lora_rank"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ({"auto_map": {"AutoConfig": "x.Y"}}, "auto_map"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_field(
    directory: Path, fields: dict[str, Any], param: str
) -> None:
    edit_config(directory, **fields)
    error = refusal(directory)
    # Where transformers' own validation objects first, the message names the field.
    assert error.param == param or (error.param == "config.json" and param in error.message)
    if param == "architectures":
        assert all(name in error.message for name in SUPPORTED)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_refused(tmp_path: Path, kind: str) -> None:
    directory = make_checkpoint(tmp_path, "llama")
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        rope |= {"original_max_position_embeddings": 64}
    edit_config(directory, rope_parameters=rope)
    assert refusal(directory).param == "rope_parameters"


def test_layer_types_that_the_family_ignores_are_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama")
    edit_config(directory, layer_types=["sliding_attention"] * 3)
    assert refusal(directory).param == "layer_types"


def test_mistral_without_a_window_has_full_attention(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "mistral", sliding_window=None)
    specs = open_checkpoint(directory).layer_specs(block_tokens=16, dtype_bytes=4)
    assert specs == (FullAttentionSpec(16, 2, 16, 4),) * 3


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def _no_header(file: Path) -> None:
    file.write_bytes(b"\xff" * 64)


def _no_json(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8] = ord("!")
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [_cut, _no_header, _no_json])
def test_damaged_weights_are_refused(directory: Path, damage: Callable[[Path], None]) -> None:
    damage(directory / "model.safetensors")
    assert refusal(directory).param == "model.safetensors"


@pytest.mark.parametrize(
    "tensor",
    [
        {"shape": [1], "data_offsets": [0, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-99, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]},
    ],
)
def test_a_header_that_says_what_cannot_be(directory: Path, tensor: dict[str, Any]) -> None:
    _write_header(directory, json.dumps({"a": tensor}).encode())
    assert "damaged safetensors header" in refusal(directory).message


def test_a_header_nested_too_deep(directory: Path) -> None:
    _write_header(directory, b"[" * 200_000)
    assert "damaged safetensors header" in refusal(directory).message


def _write_header(directory: Path, header: bytes) -> None:
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (directory / "model.safetensors").write_bytes(data)


@pytest.mark.parametrize(("size", "said"), [(3, "invalid shape"), (1, "invalid offset")])
def test_what_only_safetensors_notices_is_refused_as_well(
    directory: Path, size: int, said: str
) -> None:
    tensor = {"dtype": "F32", "shape": [size], "data_offsets": [0, 4]}
    _write_header(directory, json.dumps({"a": tensor, "b": tensor}).encode())
    with pytest.raises(ConfigError, match=said):
        NativeEngine(directory, num_blocks=2)


def test_a_tensor_in_two_files_is_refused(directory: Path) -> None:
    """The index names one of them; transformers loads the other, without a word."""
    _split(directory)
    one, two = (load_file(directory / f"{name}.safetensors") for name in ("one", "two"))
    name = sorted(one)[0]
    save_file(two | {name: one[name] * 0}, directory / "two.safetensors", {"format": "pt"})
    error = refusal(directory)
    assert error.param == "two.safetensors"
    assert f"one.safetensors both hold the tensor {name}" in error.message


def _split(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, directory / file, {"format": "pt"})
    weight_map = {name: file for file, members in parts.items() for name in members}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (directory / "model.safetensors").unlink()


def test_sharded_weights(directory: Path) -> None:
    _split(directory)
    first = open_checkpoint(directory).fingerprint
    NativeEngine(directory, num_blocks=2).close()
    (directory / "two.safetensors").unlink()
    assert refusal(directory).param == "two.safetensors"
    _no_header(directory / "two.safetensors")
    assert refusal(directory).param == "two.safetensors"
    assert len(first) == 64


def test_an_adapter_beside_the_weights_is_not_left_out(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")
    refused = refusal(directory)
    assert refused.param == "adapter_config.json"
    assert "PEFT" in refused.message
    assert "merge_and_unload" in refused.message


def test_fingerprint_follows_config_names_and_shapes(directory: Path) -> None:
    before = model_fingerprint(directory)
    assert before == model_fingerprint(directory)
    edit_config(directory, sliding_window=33)
    changed_config = model_fingerprint(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.extra"] = tensors["model.norm.weight"].clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert len({before, changed_config, model_fingerprint(directory)}) == 3


def test_fingerprint_tells_fine_tuned_models_apart(directory: Path) -> None:
    before = model_fingerprint(directory)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert model_fingerprint(directory) == before  # control
    tensors["model.layers.1.self_attn.q_proj.weight"] *= 1.01
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert model_fingerprint(directory) != before


def test_a_missing_tensor_is_refused_not_drawn_at_random(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.3.self_attn.k_proj.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing_keys.*layers.3.self_attn.k_proj"):
        NativeEngine(directory, num_blocks=2)


def test_a_tensor_of_another_shape_is_refused(directory: Path) -> None:
    edit_config(directory, intermediate_size=64)
    with pytest.raises(ConfigError, match=r"mismatched_keys.*layers.0.mlp.down_proj.weight"):
        NativeEngine(directory, num_blocks=2)


def test_a_size_that_no_tensor_has_is_refused(directory: Path) -> None:
    edit_config(directory, intermediate_size=10**30)
    with pytest.raises(ConfigError, match="size"):
        NativeEngine(directory, num_blocks=2)


def test_model_type_must_agree_with_the_architecture(directory: Path) -> None:
    edit_config(directory, architectures=["LlamaForCausalLM"])
    with pytest.raises(ConfigError) as caught:
        NativeEngine(directory, num_blocks=2)
    assert caught.value.param in ("architectures", "layer_types")


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"num_threads": 0}, "num_threads"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_bad_settings_are_refused(directory: Path, settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NativeEngine(directory, **({"num_blocks": 4} | settings))
    assert caught.value.param == param
