"""What vLLM cannot run is refused at the start, by name, and not in the first step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from disagg.errors import ConfigError
from disagg.workers.engines.vllm import start
from tests.checkpoints import edit_config, make_checkpoint
from tests.vllm.engines import VLLM_SHAPE, make_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def refusal(directory: Path, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make_vllm(directory, 50, **options)
    return caught.value


def test_blocks_without_a_kernel(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", **VLLM_SHAPE)
    refused = refusal(tmp_path, block_tokens=16)
    assert refused.param == "worker.block_tokens"
    said = "vLLM's CPU_ATTN takes multiples of 32, not 16; 32 would do, which auto chooses"
    assert said in refused.message
    assert make_vllm(tmp_path, 50, block_tokens=64).layout.hash_block_tokens == 64  # control


def test_heads_without_a_kernel(tmp_path: Path) -> None:
    refused = refusal(make_checkpoint(tmp_path, "qwen3"))
    assert "no kernel for heads of 16" in refused.message


def test_a_head_that_vllm_does_not_have(tmp_path: Path) -> None:
    """It says so of Gemma-2 alone; of Cohere-2 it would answer with wrong tokens."""
    make_checkpoint(tmp_path / "gemma2", "gemma2", **VLLM_SHAPE)
    refused = refusal(tmp_path / "gemma2")
    assert refused.param == "model"
    assert "lm_head" in refused.message
    make_checkpoint(tmp_path / "cohere2", "cohere2", **VLLM_SHAPE)
    refused = refusal(tmp_path / "cohere2")
    assert refused.param == "model"
    assert "vLLM's CohereForCausalLM takes the embeddings for the head" in refused.message


def test_weights_of_another_shape(tmp_path: Path) -> None:
    """vLLM's loader asserts it without a word; what is said has its line at least."""
    make_checkpoint(tmp_path, "qwen3", **VLLM_SHAPE)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name][:1].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused = refusal(tmp_path)
    assert refused.param == "model"
    assert "AssertionError in load" in refused.message
    assert "shape" in refused.message


def test_a_model_that_vllm_does_not_know(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", **VLLM_SHAPE)
    edit_config(tmp_path, architectures=["NobodyForCausalLM"], model_type="nobody")
    refused = refusal(tmp_path)
    assert refused.param == "model"
    assert "nobody" in refused.message


def test_models_that_continue_no_text() -> None:
    for changed, said in (
        ({"is_encoder_decoder": True}, "reads with an encoder"),
        ({"runner_type": "pooling"}, "is one for pooling"),
    ):
        given: dict[str, Any] = {"is_encoder_decoder": False, "runner_type": "generate"}
        model = SimpleNamespace(architectures=["SomeModel"], **given)
        start._check_model(model)  # control
        with pytest.raises(ConfigError, match=f"vLLM knows SomeModel, but the model {said}"):
            start._check_model(SimpleNamespace(architectures=["SomeModel"], **(given | changed)))


def test_ranks_that_do_not_divide_the_heads(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", **VLLM_SHAPE)
    refused = refusal(tmp_path, tensor_parallel=3)
    assert "attention heads (4) must be divisible by tensor parallel size (3)" in refused.message
    assert "\n" not in refused.message


def test_ranks_that_ray_has_no_room_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", **VLLM_SHAPE)
    refused = refusal(tmp_path, tensor_parallel=2, tensor_parallel_backend="ray")
    assert refused.param == "worker.tensor_parallel_backend"
    assert "Ray has reserved no room" in refused.message


def test_a_pool_that_does_not_fit(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", **VLLM_SHAPE)
    with pytest.raises(ConfigError, match=r"worker\.num_blocks"):
        make_vllm(tmp_path, 1 << 30)
