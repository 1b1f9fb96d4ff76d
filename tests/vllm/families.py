"""Tiny checkpoints of the families that the vLLM engine runs beside those of `tests.checkpoints`.

Head sizes are the least that vLLM's CPU kernels take.
"""

from pathlib import Path
from typing import Any

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    NemotronHConfig,
    NemotronHForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.checkpoints import make_checkpoint
from tests.tiny_families import TinyFamily
from tests.vllm.engines import VLLM_SHAPE

LLAMA4 = TinyFamily(
    Llama4ForCausalLM,
    Llama4TextConfig,
    4,
    False,
    VLLM_SHAPE
    | {
        "attention_chunk_size": 64,
        "no_rope_layers": [1, 1, 1, 0],
        "floor_scale": 16,
        "attn_scale": 0.5,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    },
)
"""Three chunked-local layers and a full one, whose queries are scaled by their position."""
NEMOTRON_H = TinyFamily(
    NemotronHForCausalLM,
    NemotronHConfig,
    3,
    False,
    VLLM_SHAPE
    | {
        "layers_block_type": ["mamba", "attention", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        # transformers bounds time steps from below by it, vLLM (as the model's authors) does not.
        "time_step_min": 1e-12,
        "conv_kernel": 4,
        "chunk_size": 32,
    },
)
"""Two Mamba-2 layers and attention."""
GRANITE_HYBRID = TinyFamily(
    GraniteMoeHybridForCausalLM,
    GraniteMoeHybridConfig,
    3,
    False,
    VLLM_SHAPE
    | {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_chunk_size": 32,
    },
)
"""The same with an MLP behind each."""
QWEN3_NEXT = TinyFamily(
    Qwen3NextForCausalLM,
    Qwen3NextConfig,
    4,
    False,
    VLLM_SHAPE
    | {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
)
"""Three gated delta nets and attention."""
PHI3_SHORT_TOKENS = 128
PHI3_LONG = TinyFamily(
    Phi3ForCausalLM,
    Phi3Config,
    2,
    False,
    {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "original_max_position_embeddings": PHI3_SHORT_TOKENS,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            "original_max_position_embeddings": PHI3_SHORT_TOKENS,
        },
    },
)
"""Other angles where sequences are long."""
DEEPSEEK_V3 = TinyFamily(
    DeepseekV3ForCausalLM,
    DeepseekV3Config,
    2,
    False,
    {
        "head_dim": 64,  # of the rotary part
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 2,
        "n_group": 1,
        "topk_group": 1,
    },
)
"""Latents (MLA)."""

FAMILIES = {
    "llama4": LLAMA4,
    "nemotron_h": NEMOTRON_H,
    "granite_hybrid": GRANITE_HYBRID,
    "qwen3_next": QWEN3_NEXT,
}

TIED = ("gemma2",)
"""For it vLLM knows no head but the embeddings."""


def make_family(directory: Path, family: str, window: int, **overrides: Any) -> Path:
    """Write a checkpoint of a family of this page or of `tests.checkpoints`."""
    if family in FAMILIES:
        return make_checkpoint(directory, FAMILIES[family], **overrides)
    tied = {"tie_word_embeddings": True} if family in TIED else {}
    return make_checkpoint(directory, family, window=window, **VLLM_SHAPE, **tied, **overrides)
