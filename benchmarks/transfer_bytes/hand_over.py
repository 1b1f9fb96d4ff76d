"""Blocks and bytes of one hand-over: pulled, needed, and those of every layer.

The production coordinator and layout give what the decode worker lacks. The fewest blocks that
attention can do with are worked out here, from the models' windows alone.
"""

from dataclasses import dataclass

from benchmarks.transfer_bytes.shapes import BLOCK_TOKENS, Shape
from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.sequence import KVSequence

MAX_STEP_TOKENS = 8192


@dataclass(frozen=True)
class HandOver:
    """One hand-over: what is pulled, what must be, and what a peer without windows would move."""

    shape: Shape
    num_tokens: int
    num_cached: int
    """Tokens of the prompt that the decode worker's full-attention groups have already."""
    pulled_blocks: int
    pulled_bytes: int
    """Whole blocks, padding included."""
    needed_blocks: int
    needed_bytes: int
    """Pages only, in whole blocks of tokens."""
    uncached_bytes: int
    """Every layer's blocks of what is not cached, pages only."""
    all_bytes: int
    """Every layer's blocks of the whole prompt, pages only."""

    @property
    def name(self) -> str:
        """Stable name of its figures."""
        cached = f"/cached-{self.num_cached}" if self.num_cached else ""
        return f"transfer_bytes/{self.shape.name}/{self.num_tokens}{cached}"


def hand_over(shape: Shape, num_tokens: int, num_cached: int = 0) -> HandOver:
    """Reserve on a decode worker's coordinator and compare what it lacks."""
    layout = shape.layout()
    num_blocks = len(layout.groups) * (num_tokens // BLOCK_TOKENS + 2) * 2 + 1
    coordinator = KVCacheCoordinator(
        layout, num_blocks, max_model_tokens=num_tokens + 1, max_step_tokens=MAX_STEP_TOKENS
    )
    tokens = list(range(num_tokens))
    hasher = BlockHasher(b"benchmark", BLOCK_TOKENS)
    if num_cached:
        _serve(coordinator, hasher, tokens[:num_cached])
    request = KVSequence("pulled", tokens)
    hasher.extend(request.hashes, tokens)
    reservation = coordinator.reserve_external(request, num_tokens)
    if reservation is None:
        raise AssertionError("the pool was made large enough")
    pulled = sum(map(len, reservation.lacks))
    needed = [_needed_blocks(shape, layer, num_tokens, num_cached) for layer in layers(shape)]
    prompt_blocks = -(-num_tokens // BLOCK_TOKENS)
    page_bytes = [shape.spec(layer).page_bytes for layer in layers(shape)]
    return HandOver(
        shape,
        num_tokens,
        num_cached,
        pulled_blocks=pulled,
        pulled_bytes=pulled * layout.block_bytes,
        needed_blocks=sum(needed[group.layers[0]] for group in layout.groups),
        needed_bytes=sum(n * b for n, b in zip(needed, page_bytes, strict=True)),
        uncached_bytes=(prompt_blocks - num_cached // BLOCK_TOKENS) * sum(page_bytes),
        all_bytes=prompt_blocks * sum(page_bytes),
    )


def layers(shape: Shape) -> range:
    """Numbers of the model's layers."""
    return range(shape.num_layers)


def _needed_blocks(shape: Shape, layer: int, num_tokens: int, num_cached: int) -> int:
    first = shape.first_needed(layer, num_tokens)
    if shape.is_full(layer):
        first = max(first, num_cached // BLOCK_TOKENS * BLOCK_TOKENS)
    return -(-num_tokens // BLOCK_TOKENS) - first // BLOCK_TOKENS if first < num_tokens else 0


def _serve(coordinator: KVCacheCoordinator, hasher: BlockHasher, tokens: list[int]) -> None:
    """Let the worker have computed a prompt before, chunk by chunk."""
    request = KVSequence("earlier", tokens)
    hasher.extend(request.hashes, tokens)
    for start in range(0, len(tokens), MAX_STEP_TOKENS):
        end = min(start + MAX_STEP_TOKENS, len(tokens))
        if not coordinator.allocate(request, num_new_tokens=end - start):
            raise AssertionError("the pool was made large enough")
        coordinator.publish(request.key, end)
    coordinator.free(request.key)
