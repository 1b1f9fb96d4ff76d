"""How much KV a memory budget holds: the layout, its padding, tokens and sequences that fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.errors import ConfigError
from disagg.kv.blocks.block_pool import BlockPool
from disagg.kv.kinds.kind import Spec
from disagg.kv.kinds.setting import GroupSetting
from disagg.kv.shapes.layout import KVCacheGroup, KVCacheLayout, plan_layout
from disagg.kv.shapes.whole_states import plan_whole_states

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What one group takes.

    Attributes:
        group: index in the layout.
        kind: name of the spec's kind.
        num_layers: layers that share its tables.
        block_tokens: tokens per block; for a linear state, the distance of its positions.
        window_tokens: window or chunk, 0 where the kind has none.
        blocks_per_state: blocks of one linear state, 1 for other kinds.
        token_bytes: bytes that a token takes while it is kept, padding included; 0 for states.
        state_bytes: bytes of one linear state, padding included; 0 for other kinds.
        padding_bytes: unused bytes of a block, or of a state.
        blocks_per_sequence: blocks that one sequence of the planned context holds at most.
    """

    group: int
    kind: str
    num_layers: int
    block_tokens: int
    window_tokens: int
    blocks_per_state: int
    token_bytes: int
    state_bytes: int
    padding_bytes: int
    blocks_per_sequence: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What fits into a budget.

    Attributes:
        layout: groups and block geometry; depends on the model alone.
        memory_bytes: the budget of one worker, all its ranks together.
        context_tokens: length of the sequences that are counted.
        tensor_parallel: ranks that share the worker's heads.
        rank_block_bytes: bytes of a block on one rank.
        num_blocks: blocks that fit, the null block included.
        groups: one per group of the layout.
    """

    layout: KVCacheLayout
    memory_bytes: int
    context_tokens: int
    tensor_parallel: int
    rank_block_bytes: int
    num_blocks: int
    groups: tuple[GroupPlan, ...]

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks that one sequence of ``context_tokens`` holds at most while it decodes."""
        return sum(group.blocks_per_sequence for group in self.groups)

    @property
    def num_sequences(self) -> int:
        """Sequences of ``context_tokens`` that run at once."""
        return (self.num_blocks - 1) // self.blocks_per_sequence

    @property
    def num_tokens(self) -> int:
        """Tokens of sequences of ``context_tokens`` that fit, the last one in part."""
        return (self.num_blocks - 1) * self.context_tokens // self.blocks_per_sequence


def parse_memory(text: str) -> int:
    """Bytes of a size such as ``64GiB``, ``80GB``, ``1.5TiB`` or ``1048576``.

    Raises:
        ConfigError: no such size.
    """
    number = text.strip().rstrip("KMGTiB ").strip()
    unit = text.strip()[len(number) :].strip()
    try:
        if unit not in _UNITS or not number.replace(".", "", 1).isascii():
            raise ValueError(unit)
        whole, _, fraction = number.partition(".")
        if not (whole + fraction).isdigit() or not whole:
            raise ValueError(number)
        size = int(whole + fraction) * _UNITS[unit] // int("1" + "0" * len(fraction))
    except ValueError:
        raise ConfigError(
            f"memory: {text!r} is not a size such as 64GiB, 80GB or 512MiB", param="memory"
        ) from None
    if size < 1:
        raise ConfigError(f"memory: {text!r} is nothing", param="memory")
    return size


def format_memory(num_bytes: int) -> str:
    """A size for people, such as ``1.5 GiB``."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def plan_memory(
    layer_specs: Sequence[Spec | None],
    memory_bytes: int,
    context_tokens: int,
    *,
    tensor_parallel: int = 1,
    whole_states: bool = False,
) -> MemoryPlan:
    """Lay out a model's KV cache in a budget.

    Groups, layers per group and block sizes do not depend on ``tensor_parallel``; it only decides
    how much of each block lies on one rank: heads are split, or replicated where there are fewer
    than ranks. With ``whole_states`` every layer's linear state lies within one block, as the
    vLLM engine's kernels need it.

    Raises:
        ConfigError: the model has no KV layers or block sizes that do not go together, heads
            cannot be shared by the ranks, or the budget holds not even one block.
    """
    if context_tokens < 1:
        raise ConfigError("context: must be a positive number of tokens", param="context")
    layout = plan_whole_states(layer_specs) if whole_states else plan_layout(layer_specs)
    rank_block_bytes = _rank_block_bytes(layout, tensor_parallel)
    num_blocks = memory_bytes // tensor_parallel // rank_block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"memory: {memory_bytes} bytes hold fewer than two blocks of "
            f"{rank_block_bytes * tensor_parallel}",
            param="memory",
        )
    groups = tuple(_plan_group(layout, group, context_tokens) for group in layout.groups)
    return MemoryPlan(
        layout,
        memory_bytes,
        context_tokens,
        tensor_parallel,
        rank_block_bytes,
        num_blocks,
        groups,
    )


def all_layers_full(layer_specs: Sequence[Spec | None]) -> tuple[Spec | None, ...]:
    """The same model as a cache without hybrid groups keeps it: windows and chunks grow whole."""
    return tuple(spec.without_window() if spec else None for spec in layer_specs)


def _rank_block_bytes(layout: KVCacheLayout, tensor_parallel: int) -> int:
    """Bytes of a block on one rank."""
    if tensor_parallel == 1:
        return layout.block_bytes
    return max(
        group.spec.rank_block_bytes(len(group.layers), group.blocks_per_state, tensor_parallel)
        for group in layout.groups
    )


def _plan_group(layout: KVCacheLayout, group: KVCacheGroup, context_tokens: int) -> GroupPlan:
    spec = group.spec
    setting = GroupSetting(
        group.group,
        group.blocks_per_state,
        hash_block_tokens=layout.hash_block_tokens,
        alignment_tokens=spec.block_tokens,
        max_model_tokens=context_tokens,
        max_step_tokens=1,
    )
    # From the manager that workers use: the plan and admission cannot disagree.
    manager = spec.create_manager(BlockPool(2, len(layout.groups) + 1), setting)
    taken_bytes = layout.block_bytes * group.blocks_per_state
    token_bytes, state_bytes = spec.token_and_state_bytes(taken_bytes)
    return GroupPlan(
        group=group.group,
        kind=spec.kind,
        num_layers=len(group.layers),
        block_tokens=spec.block_tokens,
        window_tokens=spec.window_tokens,
        blocks_per_state=group.blocks_per_state,
        token_bytes=token_bytes,
        state_bytes=state_bytes,
        padding_bytes=taken_bytes - group.unit_bytes,
        blocks_per_sequence=min(manager.num_blocks(context_tokens), manager.peak_blocks),
    )
