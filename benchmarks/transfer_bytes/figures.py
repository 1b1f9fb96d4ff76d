"""Figures and the document's table of what hand-overs pull."""

from collections.abc import Iterator, Sequence

from benchmarks.transfer_bytes.hand_over import HandOver, hand_over
from benchmarks.transfer_bytes.shapes import BLOCK_TOKENS, SHAPES

LENGTHS = (1_000, 8_000, 32_000, 100_000)
QUICK_LENGTHS = (1_000, 8_000)
PADDING_MAX = 0.05
"""Blocks are moved whole; of a layout's padding so much at most may come along."""
SAVED_MIN = {("llama-4-scout", 100_000): 0.69}
"""Share of all layers' bytes, of what is not cached, that must not be moved."""


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
    minimum, uncached = "analytic minimum", "every layer's blocks of what is not cached"
    yield figure("blocks", one.pulled_blocks, one.needed_blocks, "blocks", 1.0, minimum)
    yield figure("bytes", one.pulled_bytes, one.needed_bytes, "bytes", floor, minimum)
    target = 1 / (1 - saved) if saved else floor
    yield figure("all_layers", one.pulled_bytes, one.uncached_bytes, "bytes", target, uncached)
    if one.num_cached:
        everything = "every layer's blocks of the whole prompt"
        yield figure("prefix_cache", one.uncached_bytes, one.all_bytes, "bytes", 1.0, everything)


def document(results: Sequence[HandOver]) -> str:
    """The table in ``docs/benchmarks/hand-overs.md``."""
    lines = [
        "| model | prompt | cached | blocks | minimum | MB pulled | MB of all layers, not cached "
        "| saved by windows | saved by the prefix cache |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.shape.name} | {one.num_tokens:,} | {one.num_cached:,} | {one.pulled_blocks:,} "
        f"| {one.needed_blocks:,} | {one.pulled_bytes / 1e6:,.1f} "
        f"| {one.uncached_bytes / 1e6:,.1f} | {1 - one.pulled_bytes / one.uncached_bytes:.1%} "
        f"| {f'{1 - one.uncached_bytes / one.all_bytes:.1%}' if one.num_cached else '-'} |"
        for one in results
    ]
    return "\n".join(lines) + "\n"
