"""How symbolic KV lies, as contracts say it, and what a READ of a part of a block copies."""

from collections.abc import Sequence
from dataclasses import astuple, replace

from disagg.kv.shapes.layout import KVCacheLayout
from disagg.messages.forms import GroupForm, Section
from disagg.testing.simulation.symbolic_engine import Cell
from disagg.transfer.read_plan import ByteRange, ReadPlan


def symbolic_forms(layout: KVCacheLayout) -> tuple[GroupForm, ...]:
    """A byte stands for a cell: of a token, or of one of a state's blocks."""
    return tuple(
        _form(
            group.spec.kind,
            group.spec.block_tokens,
            group.spec.window_tokens,
            group.blocks_per_state if group.spec.first_seen(0) is None else 0,
            group.layers,
        )
        for group in layout.groups
    )


def _form(
    kind: str, block_tokens: int, window_tokens: int, blocks_per_state: int, layers: Sequence[int]
) -> GroupForm:
    is_state = blocks_per_state > 0
    size = blocks_per_state or block_tokens
    unit = blocks_per_state or 1
    section = Section("cells", 0, 1, 1, size, 0 if is_state else 1, unit)
    return GroupForm(
        kind,
        block_tokens,
        window_tokens,
        is_state,
        tuple(layers[:1]),
        size,
        max(1, blocks_per_state),
        1 if is_state else size,
        (section,),
    )


def part_of(plan: ReadPlan, group: int, pair: int) -> Sequence[ByteRange]:
    """The ranges of a part, as a `PostRead` names it."""
    reads = plan.groups[group]
    return reads.ranges[reads.pairs[pair]]


def flipped(cells: dict[int, Cell]) -> dict[int, Cell]:
    """What a READ brings of a block when bits of its first cell flip on their way."""
    first = min(cells)
    return cells | {first: replace(cells[first], digest=cells[first].digest ^ 1)}


def checksum_of(cells: dict[int, Cell]) -> int:
    """Of a block as it is now."""
    return hash(tuple(sorted((at, *astuple(cell)) for at, cell in cells.items())))


def read_part(
    source: dict[int, Cell], target: dict[int, Cell], ranges: Sequence[ByteRange]
) -> None:
    """Copy the cells of a part; what the owner has not written leaves nothing behind."""
    for one in ranges:
        for number in range(one.num_bytes):
            target.pop(one.dst_offset + number, None)
            if (cell := source.get(one.src_offset + number)) is not None:
                target[one.dst_offset + number] = cell
