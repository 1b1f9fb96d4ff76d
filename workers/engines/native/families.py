"""Which model families the engine runs, and what it must know about each.

A family is listed only while ``tests/unit/workers/engines/native/test_equality.py`` runs it:
packed, paged and chunked must equal the plain transformers forward.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: how its config states what each layer sees.

    Attributes:
        name: short name, as tests and messages use it.
        windows: ``per_layer`` reads ``config.layer_types``, ``every_layer`` takes
            ``config.sliding_window`` for all layers (null: none), ``no_layer`` has full attention.
        implements: those of REFUSED_FIELDS that the engine computes for this family.
        has_states: layers with a linear state, and what they keep by `read_shape`'s rule.
    """

    name: str
    windows: Literal["per_layer", "every_layer", "no_layer"]
    implements: frozenset[str] = frozenset()
    has_states: bool = False


_LATENTS = frozenset({"kv_lora_rank"})
_CHUNKS = frozenset({"attention_chunk_size", "attn_temperature_tuning"})


SUPPORTED: dict[str, Family] = {
    "BambaForCausalLM": Family("bamba", "no_layer", has_states=True),
    "Cohere2ForCausalLM": Family("cohere2", "per_layer"),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", "no_layer", _LATENTS),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", "no_layer", _LATENTS),
    "FalconH1ForCausalLM": Family("falcon_h1", "no_layer", has_states=True),
    "Gemma2ForCausalLM": Family("gemma2", "per_layer"),
    "Gemma3ForCausalLM": Family("gemma3", "per_layer"),
    "Gemma3nForCausalLM": Family("gemma3n", "per_layer", frozenset({"num_kv_shared_layers"})),
    "Gemma4ForCausalLM": Family(
        "gemma4", "per_layer", frozenset({"num_kv_shared_layers", "per_layer_config"})
    ),
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", "no_layer", _LATENTS),
    "GptOssForCausalLM": Family("gpt_oss", "per_layer"),
    "GraniteMoeHybridForCausalLM": Family("granite_hybrid", "no_layer", has_states=True),
    "JambaForCausalLM": Family("jamba", "no_layer", has_states=True),
    "Lfm2ForCausalLM": Family("lfm2", "no_layer", has_states=True),
    "Llama4ForCausalLM": Family("llama4", "per_layer", _CHUNKS),
    "LlamaForCausalLM": Family("llama", "no_layer"),
    "MistralForCausalLM": Family("mistral", "every_layer"),
    "NemotronHForCausalLM": Family("nemotron_h", "no_layer", has_states=True),
    "Qwen3ForCausalLM": Family("qwen3", "per_layer"),
    "Qwen3NextForCausalLM": Family("qwen3_next", "no_layer", has_states=True),
    "Qwen3_5ForCausalLM": Family("qwen3_5", "no_layer", has_states=True),
}
"""By the name in ``config.architectures``."""

REFUSED_FIELDS = (
    "attention_chunk_size",  # chunked-local attention
    "attn_temperature_tuning",  # queries scaled by their position
    "auto_map",  # code from the checkpoint
    "cross_attention_hidden_size",
    "is_encoder_decoder",
    "kv_lora_rank",  # MLA latents
    "num_kv_shared_layers",  # layers that read another layer's KV
    "per_layer_config",  # layers with different heads
    "quantization_config",  # equality is not tested
    "use_bidirectional_attention",
)
"""Config fields that change attention; refused when set, but for the families that have them."""

ROPE_TYPES = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""RoPE kinds whose angle depends on the token's own position alone.

``dynamic`` and ``longrope`` choose frequencies by the longest sequence of the batch: in a packed
batch one request would change another's tokens.
"""
