"""What one layer keeps per token or per request: the kinds of KV cache.

Two layers whose specs compare equal share block tables (after grouping, see ``layout``).
"""

from dataclasses import dataclass

from disagg.errors import ConfigError


def _require_positive(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{type(spec).__name__}.{name} must be a positive integer, not {value!r}",
                param=name,
            )


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Fields that every attention kind has.

    Attributes:
        block_tokens: tokens per block.
        num_kv_heads: heads of K and of V that one layer keeps here.
        head_size: elements per head.
        dtype_bytes: bytes per element.
    """

    block_tokens: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int

    def __post_init__(self) -> None:
        _require_positive(self, "block_tokens", "num_kv_heads", "head_size", "dtype_bytes")

    @property
    def page_bytes(self) -> int:
        """Useful bytes of one layer in one block: K then V."""
        return 2 * self.num_kv_heads * self.block_tokens * self.head_size * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    """Every position sees all positions before it."""


@dataclass(frozen=True, slots=True)
class MLASpec(AttentionSpec):
    """Full attention over one latent vector per token (no separate V)."""

    @property
    def page_bytes(self) -> int:
        """Useful bytes of one layer in one block: the latents."""
        return self.num_kv_heads * self.block_tokens * self.head_size * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(AttentionSpec):
    """Position p sees positions ``p - window_tokens + 1 .. p``."""

    window_tokens: int

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        _require_positive(self, "window_tokens")


@dataclass(frozen=True, slots=True)
class ChunkedLocalSpec(AttentionSpec):
    """Position p sees the positions of its own chunk up to itself."""

    chunk_tokens: int

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        _require_positive(self, "chunk_tokens")


@dataclass(frozen=True, slots=True)
class LinearStateSpec:
    """A recurrent state of fixed size; a block is the state after its last token.

    Attributes:
        block_tokens: distance of the positions at which states can be kept.
        state_bytes: bytes of one layer's state (all its tensors).
    """

    block_tokens: int
    state_bytes: int

    def __post_init__(self) -> None:
        _require_positive(self, "block_tokens", "state_bytes")

    @property
    def page_bytes(self) -> int:
        """Useful bytes of one layer in one block: the state."""
        return self.state_bytes


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec(AttentionSpec):
    """K and V of encoder outputs: every position sees all of them, none of the tokens.

    Attributes:
        encoder_tokens: encoder outputs of one request, the same for all.
    """

    encoder_tokens: int

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        _require_positive(self, "encoder_tokens")

    @property
    def num_blocks(self) -> int:
        """Blocks of one request."""
        return -(-self.encoder_tokens // self.block_tokens)


Spec = (
    FullAttentionSpec
    | MLASpec
    | SlidingWindowSpec
    | ChunkedLocalSpec
    | LinearStateSpec
    | CrossAttentionSpec
)
