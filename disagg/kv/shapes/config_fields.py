"""The fields of a model's config.json, as the rules of its family read them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from disagg.errors import ConfigError
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.linear_state import LinearStateSpec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec

STATE_DTYPE_BYTES = 4
"""Recurrent states are fp32 even in bf16 models."""


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text model: ``text_config``, or all of it.

    Raises:
        ConfigError: it is no object.
    """
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ConfigError("config.json: text_config is not an object", param="text_config")
    return text


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

    def count(self, field: str) -> int:
        """The same, or 0, which the field is as well if it is absent."""
        return 0 if self._values.get(field, 0) == 0 else self.number(field)

    def listed(self, field: str, of: type) -> list[Any]:
        """A list of such entries, empty if it is absent; raises ConfigError naming the field."""
        value = self._values.get(field, [])
        if not isinstance(value, list) or not all(isinstance(entry, of) for entry in value):
            raise ConfigError(
                f"config.json: {field}={value!r} is not a list of {of.__name__}", param=field
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
        named = next((n for n in ("head_dim", "attention_head_dim") if self.get(n)), None)
        size = self.number(named) if named else self.number("hidden_size") // num_heads
        return self.number("num_key_value_heads", num_heads), size

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
"""What each layer of a family keeps; None for nothing (an MLP alone)."""


def specs_of(
    config: ConfigFields, names: Sequence[str], state: LinearStateSpec | None = None
) -> Sequence[Spec | None]:
    """Specs by the names that ``layer_types`` uses; ``state`` is what a layer without KV keeps.

    Raises:
        ConfigError: a name that is not known here.
    """
    makers: dict[str, Callable[[], Spec | None]] = {
        "full_attention": config.full,
        "sliding_attention": config.window,
        "chunked_attention": config.chunk,
    }
    if state is not None:
        makers["attention"] = config.full
        makers |= dict.fromkeys(("linear_attention", "mamba", "conv"), lambda: state)
        makers |= dict.fromkeys(("mlp", "moe"), lambda: None)
    unknown = sorted(set(names) - makers.keys())
    if unknown:
        raise ConfigError(
            f"config.json: layer_types has {unknown}; known here are {', '.join(makers)}",
            param="layer_types",
        )
    return [makers[name]() for name in names]
