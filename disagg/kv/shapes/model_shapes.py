"""From a model's config.json to what each of its layers keeps per request.

Only the fields of a Hugging Face ``config.json`` are read, with the defaults that transformers
gives where published files leave a field out. Where a family's rule is not known exactly, it is
refused by name: a guess would be a wrong memory plan.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.errors import ConfigError
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.mla import MLASpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec

STATE_DTYPE_BYTES = 4
"""Recurrent states are fp32 even in bf16 models."""
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_REFUSED_FIELDS = ("num_kv_shared_layers", "per_layer_config", "is_encoder_decoder")


class ConfigFields:
    """The fields of the part of a config.json that describes the text model.

    Args:
        values: that part.
        defaults: what the family's configuration class fills in.
        dtype_bytes: bytes per element of K, V and convolution states.
        block_tokens: tokens per block of every layer.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        dtype_bytes: int,
        block_tokens: int,
    ) -> None:
        self._values = {**defaults, **{k: v for k, v in values.items() if v is not None}}
        self.dtype_bytes = dtype_bytes
        self.block_tokens = block_tokens

    def get(self, field: str) -> Any:
        """The field, None if it is absent or null."""
        return self._values.get(field)

    def number(self, field: str, default: int | None = None) -> int:
        """A positive integer; raises ConfigError naming the field otherwise."""
        value = self._values.get(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"config.json: {field}={value!r} is not a positive number", param=field
            )
        return value

    def with_values(self, values: Mapping[str, Any]) -> "ConfigFields":
        """The same with some fields changed, as they are for one layer."""
        return ConfigFields(values, self._values, self.dtype_bytes, self.block_tokens)

    def layers(self) -> range:
        """Numbers of the model's layers."""
        return range(self.number("num_hidden_layers"))

    def heads(self) -> tuple[int, int]:
        """Number of KV heads, and the size of one."""
        num_heads = self.number("num_attention_heads")
        size = self.get("head_dim") or self.get("attention_head_dim")
        size = size or self.number("hidden_size") // num_heads
        return self.number("num_key_value_heads", num_heads), int(size)

    def full(self) -> FullAttentionSpec:
        """Full attention with this model's heads."""
        return FullAttentionSpec(self.block_tokens, *self.heads(), self.dtype_bytes)

    def window(self) -> SlidingWindowSpec:
        """Sliding window with this model's heads."""
        window = self.number("sliding_window")
        return SlidingWindowSpec(self.block_tokens, *self.heads(), self.dtype_bytes, window)

    def chunk(self) -> ChunkedLocalSpec:
        """Chunked-local attention with this model's heads."""
        chunk = self.number("attention_chunk_size")
        return ChunkedLocalSpec(self.block_tokens, *self.heads(), self.dtype_bytes, chunk)

    def state(self, state_elements: int, conv_channels: int, kernel: int) -> LinearStateSpec:
        """A recurrent state and the last ``kernel - 1`` inputs of its convolution."""
        conv_bytes = conv_channels * (kernel - 1) * self.dtype_bytes
        return LinearStateSpec(self.block_tokens, state_elements * STATE_DTYPE_BYTES + conv_bytes)


Rule = Callable[[ConfigFields], Sequence[Spec | None]]


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
    first = config.get("max_window_layers")
    return [config.window() if layer >= int(first) else config.full() for layer in config.layers()]


def _by_layer_types(config: ConfigFields) -> Sequence[Spec | None]:
    """``layer_types``, else every ``sliding_window_pattern``-th layer is full attention."""
    return _specs_of(config, config.get("layer_types") or _periodic_types(config))


def _periodic_types(config: ConfigFields) -> list[str]:
    period = config.number("sliding_window_pattern")
    return [
        "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
        for layer in config.layers()
    ]


def _llama4(config: ConfigFields) -> Sequence[Spec | None]:
    """Layers without RoPE see everything, the others their chunk."""
    rope = config.get("no_rope_layers")
    if not rope:
        interval = config.number("no_rope_layer_interval")
        rope = [int((layer + 1) % interval != 0) for layer in config.layers()]
    names = ["chunked_attention" if has_rope else "full_attention" for has_rope in rope]
    return _specs_of(config, config.get("layer_types") or names)


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
    names = config.get("layer_types") or _periodic_types(config)
    names = [*names[:-1], "full_attention"]
    heads = {"head_dim": config.number("global_head_dim")}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        heads["num_key_value_heads"] = config.number("num_global_key_value_heads")
    said = config.get("per_layer_config")
    if said is None:
        said = {layer: heads for layer, name in enumerate(names) if name == "full_attention"}
    changed = {int(layer): values for layer, values in said.items()}
    own = [
        _specs_of(config.with_values(changed.get(layer, {})), names)[layer]
        for layer in range(len(names))
    ]
    return _without_shared(config, own)


def _without_shared(config: ConfigFields, own: Sequence[Spec | None]) -> Sequence[Spec | None]:
    num_own = len(own) - (config.get("num_kv_shared_layers") or 0)
    return [spec if layer < num_own else None for layer, spec in enumerate(own)]


def _qwen3_next(config: ConfigFields) -> Sequence[Spec | None]:
    """Gated delta net: a [key, value] matrix per value head; q, k and v are convolved."""
    names = config.get("layer_types")
    if names is None:
        period = config.number("full_attention_interval")
        names = [
            "full_attention" if (layer + 1) % period == 0 else "linear_attention"
            for layer in config.layers()
        ]
    key_size, value_size = (config.number(f"linear_{k}_head_dim") for k in ("key", "value"))
    keys = config.number("linear_num_key_heads") * key_size
    values = config.number("linear_num_value_heads") * value_size
    kernel = config.number("linear_conv_kernel_dim")
    return _specs_of(config, names, config.state(values * key_size, 2 * keys + values, kernel))


def _mamba1(config: ConfigFields) -> LinearStateSpec:
    inner = config.number("mamba_expand") * config.number("hidden_size")
    return config.state(
        inner * config.number("mamba_d_state"), inner, config.number("mamba_d_conv")
    )


def _jamba(config: ConfigFields) -> Sequence[Spec | None]:
    period, offset = config.number("attn_layer_period"), config.get("attn_layer_offset")
    state = _mamba1(config)
    return [config.full() if layer % period == offset else state for layer in config.layers()]


def _nemotron_h(config: ConfigFields) -> Sequence[Spec | None]:
    """M: Mamba-2 (x, B and C are convolved), *: attention, -: MLP only."""
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or set(pattern) - set("M*-"):
        raise ConfigError(
            f"config.json: hybrid_override_pattern={pattern!r} has more than M, * and -",
            param="hybrid_override_pattern",
        )
    inner = config.number("mamba_num_heads") * config.number("mamba_head_dim")
    size = config.number("ssm_state_size")
    channels = inner + 2 * config.number("n_groups") * size
    state = config.state(inner * size, channels, config.number("conv_kernel"))
    kinds: dict[str, Spec | None] = {"M": state, "*": config.full(), "-": None}
    return [kinds[mark] for mark in pattern]


def _specs_of(
    config: ConfigFields, names: Sequence[str], state: LinearStateSpec | None = None
) -> Sequence[Spec | None]:
    """Specs by the names that ``layer_types`` uses."""
    makers: dict[str, Callable[[], Spec]] = {
        "full_attention": config.full,
        "sliding_attention": config.window,
        "chunked_attention": config.chunk,
    }
    if state is not None:
        makers["linear_attention"] = lambda: state
    unknown = sorted(set(names) - makers.keys())
    if unknown:
        raise ConfigError(
            f"config.json: layer_types has {unknown}; known here are {', '.join(makers)}",
            param="layer_types",
        )
    return [makers[name]() for name in names]


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
_QWEN3_NEXT = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4}
_JAMBA = {
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_QWEN3 = {"head_dim": 128, "max_window_layers": 28}

_SHARING = (_shared_kv, _gemma4)
"""Rules that know of layers without KV of their own, and of layers with other heads."""

FAMILIES: dict[str, tuple[Rule, Mapping[str, Any]]] = {
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
    "JambaForCausalLM": (_jamba, _JAMBA),
    "Llama4ForCausalLM": (_llama4, _LLAMA4),
    "Llama4ForConditionalGeneration": (_llama4, _LLAMA4),
    "LlamaForCausalLM": (_no_window, {}),
    "MistralForCausalLM": (_one_window, {"num_key_value_heads": 8}),
    "MixtralForCausalLM": (_one_window, {"num_key_value_heads": 8}),
    "NemotronHForCausalLM": (_nemotron_h, {}),
    "Qwen2ForCausalLM": (_upper_windows, {"max_window_layers": 28}),
    "Qwen3ForCausalLM": (_upper_windows, _QWEN3),
    "Qwen3MoeForCausalLM": (_upper_windows, _QWEN3),
    "Qwen3NextForCausalLM": (_qwen3_next, _QWEN3_NEXT),
}
"""By the name in ``architectures``: which layer keeps what, and the fields' defaults."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model keeps per request.

    Attributes:
        architecture: as config.json names it.
        layer_specs: per layer what it keeps, None for nothing (an MLP alone).
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
    text = config.get("text_config") or config
    rule, defaults = FAMILIES[names[0]]
    known = ("num_kv_shared_layers", "per_layer_config") if rule in _SHARING else ()
    for field in _REFUSED_FIELDS:
        if text.get(field) and field not in known:
            raise ConfigError(f"config.json: {field}={text[field]!r} is not supported", param=field)
    dtype = next(
        (c[name] for c in (text, config) for name in ("dtype", "torch_dtype") if c.get(name)),
        "bfloat16",
    )
    if dtype not in _DTYPE_BYTES:
        raise ConfigError(
            f"config.json: dtype={dtype!r}; known are {', '.join(_DTYPE_BYTES)}", param="dtype"
        )
    fields = ConfigFields(text, defaults, _DTYPE_BYTES[dtype], block_tokens)
    specs = tuple(rule(fields))
    if len(specs) != len(fields.layers()):
        raise ConfigError(
            f"config.json: {len(specs)} layers are described, num_hidden_layers is "
            f"{len(fields.layers())}",
            param="num_hidden_layers",
        )
    longest = fields.get("max_position_embeddings")
    return ModelShape(names[0], specs, longest if isinstance(longest, int) else 0)
