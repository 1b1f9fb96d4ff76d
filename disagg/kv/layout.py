"""Groups of layers and where their pages lie inside a block."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.errors import ConfigError
from disagg.kv.specs import Spec


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with one spec that share block tables.

    Attributes:
        group: index of the group in the layout.
        spec: the common spec.
        layers: layer numbers, in the order in which their pages lie in a block.
    """

    group: int
    spec: Spec
    layers: tuple[int, ...]


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
            if len(group.layers) * group.spec.page_bytes > self.block_bytes:
                raise ConfigError(
                    f"group {index} needs {len(group.layers) * group.spec.page_bytes} bytes, "
                    f"a block has {self.block_bytes}",
                    param="block_bytes",
                )
            for slot, layer in enumerate(group.layers):
                if layer in place:
                    raise ConfigError(f"layer {layer} is in two groups", param="groups")
                place[layer] = (index, slot * group.spec.page_bytes)
        object.__setattr__(self, "_place", place)

    def group_of(self, layer: int) -> int:
        """Group that holds ``layer``."""
        return self._place[layer][0]

    def page_offset(self, layer: int) -> int:
        """Byte offset of the layer's page inside every block of its group."""
        return self._place[layer][1]

    def useful_bytes(self, group: int) -> int:
        """Bytes of a block of ``group`` that carry pages (they start at offset 0)."""
        return len(self.groups[group].layers) * self.groups[group].spec.page_bytes

    def padding_bytes(self, group: int) -> int:
        """Bytes of a block of ``group`` that nothing uses."""
        return self.block_bytes - self.useful_bytes(group)


def plan_layout(layer_specs: Sequence[Spec]) -> KVCacheLayout:
    """Group the layers of a model (index = layer number) with the least padding.

    Every group's block has the same size, so any free block serves any group. The number of
    layers per block is searched around the layer count of the rarest kind, as few groups mean
    few transfers; among equally tight plans the one with the fewest groups wins.

    Raises:
        ConfigError: no layers, or block sizes that are not powers of two times the smallest.
    """
    if not layer_specs:
        raise ConfigError("a model without KV layers has nothing to plan", param="layer_specs")
    kinds: dict[Spec, list[int]] = {}
    for layer, spec in enumerate(layer_specs):
        kinds.setdefault(spec, []).append(layer)
    base = min(spec.block_tokens for spec in kinds)
    for spec in kinds:
        ratio, rest = divmod(spec.block_tokens, base)
        if rest or ratio & (ratio - 1):
            raise ConfigError(
                f"block sizes must be powers of two times the smallest ({base}); "
                f"{type(spec).__name__} has {spec.block_tokens}",
                param="block_tokens",
            )
    widest = max(spec.page_bytes for spec in kinds)
    counts = [len(layers) for layers in kinds.values()]

    def num_groups(spec: Spec, block_bytes: int) -> int:
        return -(-len(kinds[spec]) // (block_bytes // spec.page_bytes))

    def cost(block_bytes: int) -> tuple[int, int]:
        groups = sum(num_groups(spec, block_bytes) for spec in kinds)
        return groups * block_bytes, groups

    sizes = range((min(counts) + 1) // 2, max(counts) + 1)
    block_bytes = min((size * widest for size in sizes), key=cost)
    groups: list[KVCacheGroup] = []
    for spec, layers in kinds.items():
        parts = num_groups(spec, block_bytes)
        groups += [
            KVCacheGroup(len(groups) + part, spec, tuple(layers[part::parts]))
            for part in range(parts)
        ]
    used = max(len(group.layers) * group.spec.page_bytes for group in groups)
    return KVCacheLayout(tuple(groups), used, base)
