"""The model families that tests make tiny checkpoints of."""

from dataclasses import dataclass, field
from typing import Any

from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 4, 2, 16, 128


LATENTS: dict[str, Any] = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
"""MLA with a different size for everything, and experts behind the first layer."""

SHARED_KV: dict[str, Any] = {
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 32,
}
"""Of six layers the last two read the KV of layers 2 and 3."""


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """How to build one family; ``windowed`` says that its config has a window at all.

    ``window_field`` is what the config calls it.
    """

    model: type[Any]
    config: type[Any]
    num_layers: int
    windowed: bool
    fields: dict[str, Any] = field(default_factory=dict)
    window_field: str = "sliding_window"


_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_GATED_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rms_norm_eps": 1e-2,  # the norm of a weak answer of the state would blow up rounding errors
}

FAMILIES: dict[str, TinyFamily] = {
    "bamba": TinyFamily(
        BambaForCausalLM, BambaConfig, 4, False, {**_MAMBA, "attn_layer_indices": [1]}
    ),
    "cohere2": TinyFamily(Cohere2ForCausalLM, Cohere2Config, 4, True, {"logit_scale": 1.0}),
    "deepseek_v2": TinyFamily(
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        3,
        False,
        LATENTS | {"q_lora_rank": None, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3": TinyFamily(
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        3,
        False,
        LATENTS | {"q_lora_rank": 20, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    ),
    "falcon_h1": TinyFamily(
        FalconH1ForCausalLM, FalconH1Config, 3, False, {**_MAMBA, "mamba_d_ssm": 128}
    ),
    "gemma2": TinyFamily(
        Gemma2ForCausalLM, Gemma2Config, 4, True, {"query_pre_attn_scalar": HEAD_DIM}
    ),
    "gemma3": TinyFamily(
        Gemma3ForCausalLM, Gemma3TextConfig, 6, True, {"query_pre_attn_scalar": HEAD_DIM}
    ),
    "gemma3n": TinyFamily(
        Gemma3nForCausalLM,
        Gemma3nTextConfig,
        6,
        True,
        SHARED_KV | {"laurel_rank": 8, "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4},
    ),
    "gemma4": TinyFamily(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        6,
        True,
        SHARED_KV | {"global_head_dim": 2 * HEAD_DIM, "use_double_wide_mlp": True},
    ),
    "glm4_moe_lite": TinyFamily(
        Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig, 3, False, LATENTS | {"q_lora_rank": 20}
    ),
    "gpt_oss": TinyFamily(
        GptOssForCausalLM,
        GptOssConfig,
        4,
        True,
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "granite_hybrid": TinyFamily(
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        4,
        False,
        {
            **_MAMBA,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": INTERMEDIATE,
            "attention_multiplier": 0.25,
        },
    ),
    "jamba": TinyFamily(
        JambaForCausalLM,
        JambaConfig,
        4,
        False,
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "lfm2": TinyFamily(
        Lfm2ForCausalLM,
        Lfm2Config,
        4,
        False,
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "llama": TinyFamily(LlamaForCausalLM, LlamaConfig, 3, False),
    "llama4": TinyFamily(
        Llama4ForCausalLM,
        Llama4TextConfig,
        4,
        True,
        {
            "intermediate_size_mlp": INTERMEDIATE,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "no_rope_layer_interval": 4,
            "floor_scale": 16,
            "attn_scale": 0.5,
        },
        "attention_chunk_size",
    ),
    "mistral": TinyFamily(MistralForCausalLM, MistralConfig, 3, True),
    "nemotron_h": TinyFamily(
        NemotronHForCausalLM,
        NemotronHConfig,
        6,
        False,
        {
            "layers_block_type": [
                "linear_attention",
                "moe",
                "full_attention",
                "linear_attention",
                "mlp",
                "linear_attention",
            ],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": INTERMEDIATE,
            "moe_shared_expert_intermediate_size": INTERMEDIATE,
        },
    ),
    "qwen3": TinyFamily(Qwen3ForCausalLM, Qwen3Config, 3, False),
    "qwen3_5": TinyFamily(Qwen3_5ForCausalLM, Qwen3_5TextConfig, 4, False, _GATED_DELTA_NET),
    "qwen3_next": TinyFamily(
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        4,
        False,
        {
            **_GATED_DELTA_NET,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": INTERMEDIATE,
            "shared_expert_intermediate_size": INTERMEDIATE,
        },
    ),
    "qwen3_window": TinyFamily(
        Qwen3ForCausalLM,
        Qwen3Config,
        3,
        True,
        {"use_sliding_window": True, "max_window_layers": 1},
    ),
}
"""``gemma3`` has five window layers and one full, ``mistral`` windows only, ``llama`` and ``qwen3``
none, the others a mix."""
