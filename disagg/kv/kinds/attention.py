"""What the kinds that keep K and V per token share: fields, pages, memory."""

from dataclasses import dataclass, replace

from disagg.errors import ConfigError


def require_positive(spec: object, *names: str) -> None:
    """Refuse fields that are no positive integers; raises ConfigError naming the field."""
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{type(spec).__name__}.{name} must be a positive integer, not {value!r}",
                param=name,
            )


def heads_per_rank(num_kv_heads: int, tensor_parallel: int) -> int:
    """KV heads that one rank keeps: a share of them, or one that other ranks keep too.

    Raises:
        ConfigError: neither number divides the other.
    """
    if tensor_parallel < 1 or (num_kv_heads % tensor_parallel and tensor_parallel % num_kv_heads):
        raise ConfigError(
            f"tensor_parallel: {num_kv_heads} KV heads cannot be shared by {tensor_parallel} ranks",
            param="tensor_parallel",
        )
    return max(1, num_kv_heads // tensor_parallel)


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
        require_positive(self, "block_tokens", "num_kv_heads", "head_size", "dtype_bytes")

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's K and V in one block."""
        return 2 * self.num_kv_heads * self.block_tokens * self.head_size * self.dtype_bytes

    def event_fields(self) -> dict[str, object]:
        """No field besides those of all kinds."""
        return {}

    def visible_tokens(self, num_tokens: int) -> int:
        """One layer keeps every token of the request."""
        return num_tokens

    def split_layers(self, num_layers: int, block_bytes: int) -> tuple[int, int]:
        """As many layers to a group as pages fit into a block."""
        return -(-num_layers // (block_bytes // self.page_bytes)), 1

    def check_blocks_per_state(self, num_blocks: int) -> None:
        """Refuse pages of several blocks: a page lies in one block."""
        if num_blocks != 1:
            raise ConfigError(f"{type(self).__name__} has no states", param="blocks_per_state")

    def rank_block_bytes(self, num_layers: int, blocks_per_state: int, tensor_parallel: int) -> int:
        """Heads are split, or replicated where there are fewer than ranks."""
        heads = heads_per_rank(self.num_kv_heads, tensor_parallel)
        return num_layers * replace(self, num_kv_heads=heads).page_bytes

    def token_and_state_bytes(self, taken_bytes: int) -> tuple[int, int]:
        """All bytes belong to tokens, none to a state."""
        return -(-taken_bytes // self.block_tokens), 0
