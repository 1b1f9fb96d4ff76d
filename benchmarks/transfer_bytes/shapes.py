"""What models keep per token, from their published configurations."""

from dataclasses import dataclass

from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.shapes.layout import KVCacheLayout, plan_layout

BLOCK_TOKENS = 16
DTYPE_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """Layers of one model and their sizes.

    Attributes:
        name: of the checkpoint whose published configuration it is.
        num_layers: layers with KV.
        full_every: every n-th layer sees everything; 0: none does.
        kv_heads: of K and of V.
        head_size: elements per head.
        window_tokens: of the other layers, 0 if none slides.
        chunk_tokens: of the other layers, 0 if none is chunked.
    """

    name: str
    num_layers: int
    full_every: int
    kv_heads: int
    head_size: int
    window_tokens: int = 0
    chunk_tokens: int = 0

    def is_full(self, layer: int) -> bool:
        """Whether a layer sees everything."""
        return self.full_every > 0 and layer % self.full_every == self.full_every - 1

    def spec(self, layer: int) -> Spec:
        """Spec of what the layer keeps."""
        sizes = (BLOCK_TOKENS, self.kv_heads, self.head_size, DTYPE_BYTES)
        if self.is_full(layer):
            return FullAttentionSpec(*sizes)
        if self.chunk_tokens:
            return ChunkedLocalSpec(*sizes, self.chunk_tokens)
        return SlidingWindowSpec(*sizes, self.window_tokens)

    def layout(self) -> KVCacheLayout:
        """The layout a worker plans for it."""
        return plan_layout([self.spec(layer) for layer in range(self.num_layers)])

    def first_needed(self, layer: int, num_tokens: int) -> int:
        """First position that the token after the prompt sees in a layer."""
        if self.is_full(layer):
            return 0
        if self.chunk_tokens:
            return num_tokens // self.chunk_tokens * self.chunk_tokens
        return max(0, num_tokens - self.window_tokens + 1)


SHAPES = (
    Shape("llama-4-scout", 48, 4, 8, 128, chunk_tokens=8192),
    Shape("gemma-3-4b", 34, 6, 4, 256, window_tokens=1024),
    Shape("gemma-3-27b", 62, 6, 16, 128, window_tokens=1024),
    Shape("gpt-oss-120b", 36, 2, 8, 64, window_tokens=128),
    Shape("mistral-7b", 32, 0, 8, 128, window_tokens=4096),
)
