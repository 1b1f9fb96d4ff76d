"""What vLLM cannot run is refused at the start, by name, and not in the first step."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_of_another_shape(tmp_path: Path, num_ranks: int) -> None:
    """vLLM's loader asserts it without a word; what is said has its line at least.

    Of ranks that fail it says only that they have, and to see a stack trace; and what they share
    would stay in memory with each try.
    """
    before = shared_names()
    make_checkpoint(tmp_path, "qwen3", **VLLM_SHAPE)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name][:1].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused = refusal(tmp_path, tensor_parallel=num_ranks)
    assert refused.param == "model"
    assert "AssertionError in load" in refused.message
    assert "shape" in refused.message
    assert f"the last tensor that was read: {name} of shape [1, " in refused.message
    left, end_s = shared_names() - before, time.monotonic() + 60
    while left & shared_names():  # of tests beside this one some are new, which go
        assert time.monotonic() < end_s, left & shared_names()
        time.sleep(0.1)


def shared_names() -> set[str]:
    """Of queues and of sums over ranks, of whoever runs here."""
    from disagg.workers.engines.vllm.shared_memory import FOLDER, SUMS  # imports vLLM

    return {one.name for one in FOLDER.iterdir() if one.name.startswith("psm_") or SUMS in one.name}


@pytest.mark.parametrize(
    ("lacking", "its_name"),
    [
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
    ],
)
def test_weights_that_the_checkpoint_lacks(tmp_path: Path, lacking: str, its_name: str) -> None:
    """vLLM would compute with what was in the memory before."""
    make_checkpoint(tmp_path, "qwen3", **VLLM_SHAPE)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[lacking]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused = refusal(tmp_path)
    assert refused.param == "model"
    assert f"the checkpoint lacks weights, or has some that are no numbers, for {its_name} " in (
        refused.message
    )


def test_other_files_beside_the_weights_are_not_loaded(tmp_path: Path) -> None:
    """vLLM would load both, and the last one would be the model."""
    make_checkpoint(tmp_path, "qwen3", **VLLM_SHAPE)
    weights = load_file(tmp_path / "model.safetensors")
    others = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
    save_file(others, tmp_path / "z.safetensors", metadata={"format": "pt"})
    runner: Any = make_vllm(tmp_path, 50).runner
    loaded = runner._runner.get_model().model.embed_tokens.weight
    assert torch.equal(loaded, weights["model.embed_tokens.weight"])


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
