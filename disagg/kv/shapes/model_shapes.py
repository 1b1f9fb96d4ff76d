"""From a model's config.json to what each of its layers keeps per request.

Only the fields of a Hugging Face ``config.json`` are read, with the defaults that transformers
gives where published files leave a field out. Where a family's rule is not known exactly, it is
refused by name: a guess would be a wrong memory plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.errors import ConfigError
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.shapes.config_fields import ConfigFields, Rule, specs_of, text_part
from disagg.kv.shapes.state_rules import STATE_FAMILIES

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_REFUSED_FIELDS = ("num_kv_shared_layers", "per_layer_config", "is_encoder_decoder")


def _no_window(config: ConfigFields) -> Sequence[Spec | None]:
    return [config.full() for _ in config.layers()]


def _one_window(config: ConfigFields) -> Sequence[Spec | None]:
    spec = config.window() if config.get("sliding_window") else config.full()
    return [spec for _ in config.layers()]


def _upper_windows(config: ConfigFields) -> Sequence[Spec | None]:
    """Qwen: layers from ``max_window_layers`` on have the window, if it is used at all."""
    if config.get("layer_types"):
        return _by_layer_types(config)
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return _no_window(config)
    first = config.count("max_window_layers")
    return [config.window() if layer >= first else config.full() for layer in config.layers()]


def _by_layer_types(config: ConfigFields) -> Sequence[Spec | None]:
    """``layer_types``, else every ``sliding_window_pattern``-th layer is full attention."""
    return specs_of(config, config.listed("layer_types", str) or _periodic_types(config))


def _periodic_types(config: ConfigFields) -> list[str]:
    period = config.number("sliding_window_pattern")
    return [
        "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
        for layer in config.layers()
    ]


def _llama4(config: ConfigFields) -> Sequence[Spec | None]:
    """Layers without RoPE see everything, the others their chunk."""
    rope = config.listed("no_rope_layers", int)
    if not rope:
        interval = config.number("no_rope_layer_interval")
        rope = [int((layer + 1) % interval != 0) for layer in config.layers()]
    names = ["chunked_attention" if has_rope else "full_attention" for has_rope in rope]
    return specs_of(config, config.listed("layer_types", str) or names)


def _latents(config: ConfigFields) -> Sequence[Spec | None]:
    """DeepSeek: one compressed latent and one rotary key per token."""
    size = config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
    return [MLASpec(config.block_tokens, 1, size, config.dtype_bytes) for _ in config.layers()]


def _shared_kv(config: ConfigFields) -> Sequence[Spec | None]:
    """Gemma-3n: the last ``num_kv_shared_layers`` layers read the KV of those before them."""
    own = _by_layer_types(config)
    return _without_shared(config, own)


def _gemma4(config: ConfigFields) -> Sequence[Spec | None]:
    """Gemma-4: the same, and full attention has heads of its own."""
    names = config.listed("layer_types", str) or _periodic_types(config)
    names = [*names[:-1], "full_attention"]
    heads = {"head_dim": config.number("global_head_dim")}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        heads["num_key_value_heads"] = config.number("num_global_key_value_heads")
    said = config.get("per_layer_config")
    if said is None:
        said = {layer: heads for layer, name in enumerate(names) if name == "full_attention"}
    try:
        changed = {int(layer): dict(values) for layer, values in said.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"config.json: per_layer_config={said!r} is not an object of objects by layer",
            param="per_layer_config",
        ) from error
    own = [
        specs_of(config.with_values(changed.get(layer, {})), names)[layer]
        for layer in range(len(names))
    ]
    return _without_shared(config, own)


def _without_shared(config: ConfigFields, own: Sequence[Spec | None]) -> Sequence[Spec | None]:
    num_own = len(own) - config.count("num_kv_shared_layers")
    return [spec if layer < num_own else None for layer, spec in enumerate(own)]


_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131_072,
}
_GEMMA2 = {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2}
_GEMMA3N = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 5,
    "num_kv_shared_layers": 15,
    "max_position_embeddings": 32_768,
}
_GEMMA4 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131_072,
}
_COHERE2 = {"sliding_window": 4096, "sliding_window_pattern": 4}
_GPT_OSS = {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2}
_LLAMA4 = {"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "head_dim": 128}
_QWEN3 = {"head_dim": 128, "max_window_layers": 28}

_SHARING = (_shared_kv, _gemma4)
"""Rules that know of layers without KV of their own, and of layers with other heads."""

FAMILIES: dict[str, tuple[Rule, Mapping[str, Any]]] = STATE_FAMILIES | {
    "Cohere2ForCausalLM": (_by_layer_types, _COHERE2),
    "DeepseekV2ForCausalLM": (_latents, {}),
    "DeepseekV3ForCausalLM": (_latents, {}),
    "Gemma2ForCausalLM": (_by_layer_types, _GEMMA2),
    "Gemma3ForCausalLM": (_by_layer_types, _GEMMA3),
    "Gemma3ForConditionalGeneration": (_by_layer_types, _GEMMA3),
    "Gemma3nForCausalLM": (_shared_kv, _GEMMA3N),
    "Gemma3nForConditionalGeneration": (_shared_kv, _GEMMA3N),
    "Gemma4ForCausalLM": (_gemma4, _GEMMA4),
    "Gemma4ForConditionalGeneration": (_gemma4, _GEMMA4),
    "Glm4MoeLiteForCausalLM": (_latents, {}),
    "GptOssForCausalLM": (_by_layer_types, _GPT_OSS),
    "Llama4ForCausalLM": (_llama4, _LLAMA4),
    "Llama4ForConditionalGeneration": (_llama4, _LLAMA4),
    "LlamaForCausalLM": (_no_window, {}),
    "MistralForCausalLM": (_one_window, {"num_key_value_heads": 8}),
    "MixtralForCausalLM": (_one_window, {"num_key_value_heads": 8}),
    "Qwen2ForCausalLM": (_upper_windows, {"max_window_layers": 28}),
    "Qwen3ForCausalLM": (_upper_windows, _QWEN3),
    "Qwen3MoeForCausalLM": (_upper_windows, _QWEN3),
}
"""By the name in ``architectures``: which layer keeps what, and the fields' defaults."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model keeps per request.

    Attributes:
        architecture: as config.json names it.
        layer_specs: per layer what it keeps, None for nothing (an MLP alone). Where every layer
            has attention and a state: what the attention keeps, layer by layer, then the states.
        max_model_tokens: longest sequence, 0 if the config has none.
    """

    architecture: str
    layer_specs: tuple[Spec | None, ...]
    max_model_tokens: int


def read_shape(config: Mapping[str, Any], *, block_tokens: int = 16) -> ModelShape:
    """Derive a model's shape from the content of its config.json.

    Args:
        config: the parsed file.
        block_tokens: tokens per block of every layer, states included.

    Raises:
        ConfigError: an unsupported architecture or a field that is missing or wrong, by name.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
        raise ConfigError(
            f"config.json: architectures={names} is not supported; "
            f"supported are {', '.join(sorted(FAMILIES))}",
            param="architectures",
        )
    text = text_part(config)
    rule, defaults = FAMILIES[names[0]]
    known = ("num_kv_shared_layers", "per_layer_config") if rule in _SHARING else ()
    for field in _REFUSED_FIELDS:
        if text.get(field) and field not in known:
            raise ConfigError(f"config.json: {field}={text[field]!r} is not supported", param=field)
    dtype = next(
        (c[name] for c in (text, config) for name in ("dtype", "torch_dtype") if c.get(name)),
        "bfloat16",
    )
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise ConfigError(
            f"config.json: dtype={dtype!r}; known are {', '.join(_DTYPE_BYTES)}", param="dtype"
        )
    fields = ConfigFields(text, defaults, _DTYPE_BYTES[dtype], block_tokens)
    specs = tuple(rule(fields))
    if fields.get("num_hidden_layers") is not None:  # Nemotron-H names its layers, uncounted
        stated = fields.number("num_hidden_layers")
        if len(specs) % stated:
            raise ConfigError(
                f"config.json: {len(specs)} layers are described, num_hidden_layers is {stated}",
                param="num_hidden_layers",
            )
    longest = fields.get("max_position_embeddings")
    return ModelShape(names[0], specs, longest if isinstance(longest, int) else 0)
