"""Groups of layers and where their pages lie inside a block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from disagg.errors import ConfigError
from disagg.kv.kinds.kind import Spec

LAYOUT_VERSION = 1
"""Of the rules here and in `whole_states`: raised by whoever changes for any model which layers
share a block, or where their pages lie in it. It is in the contract between workers and in the
header of a tier's store: equal ones exchange KV, whatever else changed between two releases."""
REFERENCE_TOKENS = 32_768
"""Layouts are compared by what a request of this length holds."""
SPARE_SHARE = 16
"""A layout with fewer groups may take up to one part in so many more than the tightest."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with one spec that share block tables.

    Attributes:
        group: index of the group in the layout.
        spec: the common spec.
        layers: layer numbers, in the order in which their pages lie in a block.
        blocks_per_state: blocks that one linear state of these layers takes; 1 for other kinds.
    """

    group: int
    spec: Spec
    layers: tuple[int, ...]
    blocks_per_state: int = 1

    @property
    def unit_bytes(self) -> int:
        """Bytes that all its layers keep in one block, or in one linear state."""
        return len(self.layers) * self.spec.page_bytes


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """All groups of a model and the one block geometry that serves them.

    Attributes:
        groups: ``groups[i].group == i``.
        block_bytes: bytes of a block, the same for every group.
        hash_block_tokens: tokens per link of the hash chain; divides every block size.
    """

    groups: tuple[KVCacheGroup, ...]
    block_bytes: int
    hash_block_tokens: int
    _place: dict[int, tuple[int, int]] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        place: dict[int, tuple[int, int]] = {}
        if not self.groups:
            raise ConfigError("a KV cache layout needs at least one group", param="groups")
        for index, group in enumerate(self.groups):
            if group.group != index:
                raise ConfigError(f"group {index} is numbered {group.group}", param="groups")
            if group.spec.block_tokens % self.hash_block_tokens:
                raise ConfigError(
                    f"group {index}: block of {group.spec.block_tokens} tokens is no multiple "
                    f"of the hash block of {self.hash_block_tokens}",
                    param="hash_block_tokens",
                )
            group.spec.check_blocks_per_state(group.blocks_per_state)
            if group.blocks_per_state < 1 or group.unit_bytes > (
                self.block_bytes * group.blocks_per_state
            ):
                raise ConfigError(
                    f"group {index} needs {group.unit_bytes} bytes, {group.blocks_per_state} "
                    f"block(s) have {self.block_bytes} each",
                    param="block_bytes",
                )
            for slot, layer in enumerate(group.layers):
                if layer in place:
                    raise ConfigError(f"layer {layer} is in two groups", param="groups")
                place[layer] = (index, slot * group.spec.page_bytes)
        object.__setattr__(self, "_place", place)

    @classmethod
    def one_layer_per_group(cls, specs: Sequence[Spec]) -> "KVCacheLayout":
        """A group of one layer per spec, in this order; one block per state."""
        groups = tuple(KVCacheGroup(i, spec, (i,)) for i, spec in enumerate(specs))
        tokens = gcd(*(spec.block_tokens for spec in specs))
        return cls(groups, max(spec.page_bytes for spec in specs), tokens)

    def group_of(self, layer: int) -> int:
        """Group that holds ``layer``."""
        return self._place[layer][0]

    def page_offset(self, layer: int) -> int:
        """Byte offset of the layer's page inside every block of its group.

        A state of several blocks is cut evenly: the offset counts in the ``useful_bytes`` of its
        blocks, laid end to end.
        """
        return self._place[layer][1]

    def useful_bytes(self, group: int) -> int:
        """Bytes of a block of ``group`` that carry pages (they start at offset 0)."""
        return -(-self.groups[group].unit_bytes // self.groups[group].blocks_per_state)

    def padding_bytes(self, group: int) -> int:
        """Bytes of a block of ``group`` that nothing uses."""
        return self.block_bytes - self.useful_bytes(group)


def plan_layout(layer_specs: Sequence[Spec | None]) -> KVCacheLayout:
    """Group the layers of a model (index = layer number; None keeps nothing).

    Every group's block has the same size, so any free block serves any group. Wanted are few
    groups, as each means transfers and look-ups of its own, at little padding: of the layouts
    that take at most 1/16 more than the tightest for a request of ``REFERENCE_TOKENS``, the one
    with the fewest groups wins.

    All layers with one kind of linear state form one group, whose state is a list of blocks: the
    attention block need not grow to the size of a state (an engine whose kernels need it whole
    has `plan_whole_states`). Nothing here depends on how many ranks share the heads.

    Raises:
        ConfigError: no layers, or block sizes that are not powers of two times the smallest.
    """
    kinds = layers_by_spec(layer_specs)
    # A state is a list of blocks: it does not affect their size where there are pages.
    paged = {s: layers for s, layers in kinds.items() if s.visible_tokens(REFERENCE_TOKENS)}
    # States alone: as large as the smallest of them, the others are lists.
    block_bytes = _block_bytes(paged) if paged else min(s.page_bytes * len(kinds[s]) for s in kinds)
    groups: list[KVCacheGroup] = []
    for spec, layers in kinds.items():
        parts, blocks = spec.split_layers(len(layers), block_bytes)
        groups += [
            KVCacheGroup(len(groups) + part, spec, tuple(layers[part::parts]), blocks)
            for part in range(parts)
        ]
    return KVCacheLayout(tuple(groups), block_bytes, min(spec.block_tokens for spec in kinds))


def layers_by_spec(layer_specs: Sequence[Spec | None]) -> dict[Spec, list[int]]:
    """Layer numbers of each spec, in the order of their first layers.

    Raises:
        ConfigError: no layers, or block sizes that are not powers of two times the smallest.
    """
    kinds: dict[Spec, list[int]] = {}
    for layer, spec in enumerate(layer_specs):
        if spec is not None:
            kinds.setdefault(spec, []).append(layer)
    if not kinds:
        raise ConfigError("a model without KV layers has nothing to plan", param="layer_specs")
    base = min(spec.block_tokens for spec in kinds)
    for spec in kinds:
        ratio, rest = divmod(spec.block_tokens, base)
        if rest or ratio & (ratio - 1):
            raise ConfigError(
                f"block sizes must be powers of two times the smallest ({base}); "
                f"{type(spec).__name__} has {spec.block_tokens}",
                param="block_tokens",
            )
    return kinds


def _block_bytes(kinds: Mapping[Spec, Sequence[int]]) -> int:
    """Block size for the kinds that keep tokens."""
    counts = {spec: len(layers) for spec, layers in kinds.items()}
    widest = max(spec.page_bytes for spec in counts)

    def parts(spec: Spec, size: int) -> int:
        return spec.split_layers(counts[spec], size)[0]

    def used(size: int) -> int:
        """The size without what no group of it would use."""
        return max(
            -(-number // parts(spec, size)) * spec.page_bytes for spec, number in counts.items()
        )

    sizes = {
        used(pages * spec.page_bytes)
        for spec, number in counts.items()
        for pages in range(1, number + 1)
        if pages * spec.page_bytes >= widest
    }
    kept = {spec: -(-spec.visible_tokens(REFERENCE_TOKENS) // spec.block_tokens) for spec in counts}

    def num_groups(size: int) -> int:
        return sum(parts(spec, size) for spec in counts)

    def held(size: int) -> int:
        return size * sum(parts(spec, size) * kept[spec] for spec in counts)

    tightest = min(map(held, sizes))
    fair = [size for size in sizes if held(size) <= tightest + tightest // SPARE_SHARE]
    return min(fair, key=lambda size: (num_groups(size), held(size), size))
