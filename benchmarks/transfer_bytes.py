"""Blocks and bytes that a hand-over pulls, for model shapes and prompt lengths.

``python -m benchmarks.transfer_bytes [--quick]`` prints one JSON line per figure. Nothing is
timed: the production coordinator and layout say what the decode worker lacks, and it is compared
with the fewest blocks that attention can do with, worked out here from the models' windows alone,
and with moving every block of every layer. The numbers are the same on every machine.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disagg.kv.coordinator import KVCacheCoordinator
from disagg.kv.hashing import BlockHasher
from disagg.kv.kinds.chunked_local import ChunkedLocalSpec
from disagg.kv.kinds.full_attention import FullAttentionSpec
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.sliding_window import SlidingWindowSpec
from disagg.kv.sequence import KVSequence
from disagg.kv.shapes.layout import KVCacheLayout, plan_layout

BLOCK_TOKENS = 16
DTYPE_BYTES = 2
MAX_STEP_TOKENS = 8192
LENGTHS = (1_000, 8_000, 32_000, 100_000)
QUICK_LENGTHS = (1_000, 8_000)
PADDING_MAX = 0.05
"""Blocks are moved whole; of a layout's padding so much at most may come along."""
SAVED_MIN = {("llama-4-scout", 100_000): 0.69}
"""Share of all layers' bytes that must not be moved."""


@dataclass(frozen=True)
class Shape:
    """What a model keeps per token.

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
        """What the layer keeps."""
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


@dataclass(frozen=True)
class HandOver:
    """One hand-over: what is pulled, what must be, and what all layers have."""

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
    all_bytes: int
    """Every block of every layer, pages only."""

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
    page_bytes = [shape.spec(layer).page_bytes for layer in layers(shape)]
    return HandOver(
        shape,
        num_tokens,
        num_cached,
        pulled_blocks=pulled,
        pulled_bytes=pulled * layout.block_bytes,
        needed_blocks=sum(needed[group.layers[0]] for group in layout.groups),
        needed_bytes=sum(n * b for n, b in zip(needed, page_bytes, strict=True)),
        all_bytes=sum(-(-num_tokens // BLOCK_TOKENS) * b for b in page_bytes),
    )


def layers(shape: Shape) -> range:
    """Numbers of the layers."""
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


def hand_overs(lengths: Sequence[int]) -> Iterator[HandOver]:
    """Every shape and length; from 32,000 tokens on also with the first half cached."""
    for shape in SHAPES:
        for length in lengths:
            yield hand_over(shape, length)
            if length >= 32_000 and shape.full_every:
                yield hand_over(shape, length, length // 2)


def figures(one: HandOver) -> Iterator[dict[str, object]]:
    """Its figures; a ratio above 1 is better than the peer."""

    def figure(
        what: str, ours: int, peer: int, unit: str, target: float, peer_name: str
    ) -> dict[str, object]:
        ratio = peer / ours
        return {
            "name": f"{one.name}/{what}",
            "ours": ours,
            "peer": peer,
            "unit": unit,
            "ratio": round(ratio, 4),
            "target": round(target, 4),
            "ok": ratio >= target,
            "peer_name": peer_name,
            "note": f"computed by the coordinator, not timed; blocks of {BLOCK_TOKENS} tokens",
        }

    saved = SAVED_MIN.get((one.shape.name, one.num_tokens), 0.0)
    floor = 1 - PADDING_MAX
    minimum, everything = "analytic minimum", "every block of every layer"
    yield figure("blocks", one.pulled_blocks, one.needed_blocks, "blocks", 1.0, minimum)
    yield figure("bytes", one.pulled_bytes, one.needed_bytes, "bytes", floor, minimum)
    target = 1 / (1 - saved) if saved else floor
    yield figure("all_layers", one.pulled_bytes, one.all_bytes, "bytes", target, everything)


def document(results: Sequence[HandOver]) -> str:
    """The table in ``docs/benchmarks.md``."""
    lines = [
        "| model | prompt | cached | blocks | minimum | MB pulled | MB of all layers | saved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.shape.name} | {one.num_tokens:,} | {one.num_cached:,} | {one.pulled_blocks:,} "
        f"| {one.needed_blocks:,} | {one.pulled_bytes / 1e6:,.1f} | {one.all_bytes / 1e6:,.1f} "
        f"| {1 - one.pulled_bytes / one.all_bytes:.1%} |"
        for one in results
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the figures; the exit code is 1 if one misses its target."""
    parser = argparse.ArgumentParser(prog="benchmarks.transfer_bytes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="prompts up to 8,000 tokens only")
    parser.add_argument("--table", action="store_true", help="the document's table instead")
    given = parser.parse_args()
    results = list(hand_overs(QUICK_LENGTHS if given.quick else LENGTHS))
    if given.table:
        print(document(results), end="")
        return 0
    lines = [line for one in results for line in figures(one)]
    for line in lines:
        print(json.dumps(line))
    return 0 if all(line["ok"] for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
