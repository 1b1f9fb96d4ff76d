"""Which model families the engine runs, and what it must know about each.

A family is listed only while ``tests/unit/workers/engines/native/test_equality.py`` runs it:
packed, paged and chunked must equal the plain transformers forward.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: how its config states which layers have a window.

    Attributes:
        name: short name, as tests and messages use it.
        windows: ``per_layer`` reads ``config.layer_types``, ``every_layer`` takes
            ``config.sliding_window`` for all layers (null: none), ``no_layer`` has full attention.
        has_states: layers with a linear state, and what they keep by `read_shape`'s rule.
    """

    name: str
    windows: Literal["per_layer", "every_layer", "no_layer"]
    has_states: bool = False


SUPPORTED: dict[str, Family] = {
    "BambaForCausalLM": Family("bamba", "no_layer", has_states=True),
    "Cohere2ForCausalLM": Family("cohere2", "per_layer"),
    "FalconH1ForCausalLM": Family("falcon_h1", "no_layer", has_states=True),
    "Gemma2ForCausalLM": Family("gemma2", "per_layer"),
    "Gemma3ForCausalLM": Family("gemma3", "per_layer"),
    "GptOssForCausalLM": Family("gpt_oss", "per_layer"),
    "GraniteMoeHybridForCausalLM": Family("granite_hybrid", "no_layer", has_states=True),
    "JambaForCausalLM": Family("jamba", "no_layer", has_states=True),
    "Lfm2ForCausalLM": Family("lfm2", "no_layer", has_states=True),
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
    "attn_temperature_tuning",  # scales by positions counted in packed form (Llama-4)
    "auto_map",  # code from the checkpoint
    "cross_attention_hidden_size",
    "is_encoder_decoder",
    "kv_lora_rank",  # MLA latents
    "num_kv_shared_layers",  # layers that read another layer's KV
    "quantization_config",  # equality is not tested
    "use_bidirectional_attention",
)
"""Config fields that change attention in a way the engine does not implement; refused when set."""

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""RoPE kinds whose angle depends on the token's own position alone.

``dynamic`` and ``longrope`` choose frequencies by the longest sequence of the batch: in a packed
batch one request would change another's tokens.
"""
