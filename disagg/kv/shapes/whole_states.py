"""Layouts for kernels that need a layer's linear state whole, within one block."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from disagg.kv.kinds.kind import Spec, keeps_states
from disagg.kv.shapes.layout import (
    REFERENCE_TOKENS,
    KVCacheGroup,
    KVCacheLayout,
    layers_by_spec,
    plan_layout,
)

NUM_GROUPS_FAIR = 8
"""Fewer groups than this are not worth larger blocks: every step prepares each group's tables."""


def plan_whole_states(layer_specs: Sequence[Spec | None]) -> KVCacheLayout:
    """Group the layers of a model as `plan_layout` does, with every state within one block.

    Where there are states, all block sizes in tokens are raised by one factor, so that the pages
    of a block take about as much as the states of a block. The rest of the larger one is padding.
    Of the layouts with at most ``NUM_GROUPS_FAIR`` groups, or as few as can be, that one wins in
    which a request of ``REFERENCE_TOKENS`` holds the fewest bytes: its tokens, half a block that
    is not full yet in each group, one state per layer, and their padding. So prefixes are found,
    and memory is wasted, in steps no larger than the states ask for.

    Args:
        layer_specs: index = layer number, None keeps nothing; ``block_tokens`` is the kernel's
            own, of which the planned one is a multiple.

    Raises:
        ConfigError: no layers, or block sizes that are not powers of two times the smallest.
    """
    kinds = layers_by_spec(layer_specs)
    states = {spec: layers for spec, layers in kinds.items() if keeps_states(spec)}
    if not states:
        return plan_layout(layer_specs)
    all_states = sum(spec.page_bytes * len(layers) for spec, layers in states.items())
    all_pages = sum(s.page_bytes * len(layers) for s, layers in kinds.items() if s not in states)
    factor_max = -(-all_states // all_pages) if all_pages else 1
    best = min(
        (one for factor in range(1, factor_max + 1) for one in _candidates(kinds, factor)),
        key=lambda one: (max(one.num_groups, NUM_GROUPS_FAIR), one.held, one.factor),
    )
    return best.layout(kinds)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A block size.

    Attributes:
        factor: of the block sizes in tokens.
        block_bytes: of a block.
        num_groups: groups it makes.
        held: bytes that a request holds.
    """

    factor: int
    block_bytes: int
    num_groups: int
    held: Fraction

    def layout(self, kinds: Mapping[Spec, Sequence[int]]) -> KVCacheLayout:
        groups: list[KVCacheGroup] = []
        for spec, layers in kinds.items():
            raised = replace(spec, block_tokens=spec.block_tokens * self.factor)
            parts = _num_parts(raised.page_bytes, len(layers), self.block_bytes)
            groups += [
                KVCacheGroup(len(groups) + part, raised, tuple(layers[part::parts]))
                for part in range(parts)
            ]
        tokens = min(group.spec.block_tokens for group in groups)
        return KVCacheLayout(tuple(groups), self.block_bytes, tokens)


def _candidates(kinds: Mapping[Spec, Sequence[int]], factor: int) -> Iterator[_Candidate]:
    """Every block size that some group fills, for block sizes in tokens of so much."""
    pages: list[tuple[int, int, Fraction]] = []
    """Per kind: bytes of a layer in a block, layers, and the blocks that a request holds."""
    for spec, layers in kinds.items():
        grows = 1 if keeps_states(spec) else factor
        seen, tokens = spec.visible_tokens(REFERENCE_TOKENS), spec.block_tokens * factor
        blocks = Fraction(2 * seen + tokens, 2 * tokens) if seen else Fraction(1)
        pages.append((spec.page_bytes * grows, len(layers), blocks))
    widest = max(page for page, _, _ in pages)
    sizes = {page * n for page, number, _ in pages for n in range(1, number + 1)}
    for size in sizes:
        if size >= widest:
            parts = [_num_parts(page, number, size) for page, number, _ in pages]
            held = sum(n * blocks for n, (_, _, blocks) in zip(parts, pages, strict=True))
            yield _Candidate(factor, size, sum(parts), size * Fraction(held))


def _num_parts(page_bytes: int, num_layers: int, block_bytes: int) -> int:
    """Groups of so many layers, if as many form one as a block has room for."""
    return -(-num_layers // (block_bytes // page_bytes))
