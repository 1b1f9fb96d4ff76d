"""Drawn forms of KV blocks, and what workers of such forms hold of one canonical KV."""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from disagg.messages.forms import GroupForm, Section
from disagg.messages.registration import Contract

CONTRACT = Contract("model", "float32", ("g",), "pages", 1, 1, "scheme", 1, 1)


@dataclass(frozen=True)
class Side:
    """One worker's form of a group, and its ranks."""

    form: GroupForm
    num_ranks: int

    @property
    def contract(self) -> Contract:
        block_bytes = self.form.useful_bytes
        tokens = str(self.form.block_tokens)
        return replace(
            CONTRACT,
            groups=(f"{tokens} {self.form.sections}",),
            block_bytes=block_bytes,
            num_ranks=self.num_ranks,
            forms=(self.form,),
        )


@dataclass(frozen=True)
class Tensor:
    """A section as the model has it, whoever holds it."""

    name: str
    num_heads: int
    unit_bytes: int
    by_token: bool


@dataclass(frozen=True)
class Case:
    """An owner and a reader of one group."""

    tensors: tuple[Tensor, ...]
    owner: Side
    reader: Side


@st.composite
def sides(
    draw: st.DrawFn,
    tensors: tuple[Tensor, ...],
    *,
    is_state: bool,
    block_tokens: int,
    window_tokens: int,
    layers: tuple[int, ...],
    orders: tuple[bool, ...] | None = None,
) -> Side:
    """One worker: its ranks, and where it keeps each tensor, gaps and all."""
    num_ranks = draw(st.sampled_from([1, 2, 4, 8]))
    sections: list[Section] = []
    offset = 0
    for number, tensor in enumerate(tensors):
        heads = max(1, tensor.num_heads // num_ranks)
        heads_first = orders[number] if orders else draw(st.booleans())
        gap = draw(st.integers(0, 3))
        unit = tensor.unit_bytes
        if not tensor.by_token:
            head_stride, token_stride, size = unit + gap, 0, heads * (unit + gap)
        elif heads_first:
            head_stride, token_stride = block_tokens * unit + gap, unit
            size = heads * head_stride
        else:
            head_stride, token_stride = unit, heads * unit + gap
            size = block_tokens * token_stride
        offset += draw(st.integers(0, 2))
        sections.append(
            Section(tensor.name, offset, tensor.num_heads, heads, head_stride, token_stride, unit)
        )
        offset += size
    page_bytes = offset + draw(st.integers(0, 3))
    blocks = draw(st.integers(1, 4)) if is_state else 1
    useful = -(-page_bytes * len(layers) // blocks)
    form = GroupForm(
        "state" if is_state else "pages",
        block_tokens,
        window_tokens,
        is_state,
        layers,
        page_bytes,
        blocks,
        useful,
        tuple(sections),
    )
    return Side(form, num_ranks)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two workers of one model, unequal in whatever may be unequal."""
    is_state = draw(st.booleans())
    tensors = tuple(
        Tensor(
            name,
            draw(st.sampled_from([1, 2, 4, 8])),  # 1: latents, the same on every rank
            draw(st.integers(1, 6)),
            not is_state,
        )
        for name in draw(st.sampled_from([("latents",), ("keys", "values"), ("a", "b", "c")]))
    )
    small = draw(st.sampled_from([1, 2, 3, 4]))
    ratio = draw(st.sampled_from([1, 2, 4]))
    sizes = (small, small * ratio)
    if draw(st.booleans()):
        sizes = sizes[::-1]
    if draw(st.booleans()) and not is_state:  # kernels that pack the tokens of a block
        sizes = (small, small)
        tensors = tuple(replace(one, by_token=False) for one in tensors)
    layers = tuple(range(draw(st.integers(1, 3))))
    owner, reader = (
        draw(sides(tensors, is_state=is_state, block_tokens=size, window_tokens=5, layers=layers))
        for size in sizes
    )
    return Case(tensors, owner, reader)


Units = dict[tuple[int, str, int, int], bytes]
"""The canonical KV of some tokens: bytes by layer, tensor, head and token (0 of a state)."""


def spread(side: Side, units: Units, num_cells: int, cell_blocks: int) -> list[list[bytearray]]:
    """What each rank of a worker holds of it: [rank][block] of ``num_cells`` cells.

    Byte by byte, through the place of each unit in the whole of a rank's memory.
    """
    form = side.form
    blocks_each = form.blocks_per_state if form.is_state else 1
    memory: list[list[bytearray]] = []
    for rank in range(side.num_ranks):
        blocks = [bytearray(form.useful_bytes) for _ in range(num_cells * cell_blocks)]
        for (layer, name, head, token), content in units.items():
            (section,) = [one for one in form.sections if one.name == name]
            ranks_per_head = max(1, side.num_ranks // section.num_heads)
            first = rank // ranks_per_head if ranks_per_head > 1 else rank * section.heads_per_rank
            if not first <= head < first + section.heads_per_rank:
                continue
            at = form.layers.index(layer) * form.page_bytes + section.offset
            at += (head - first) * section.head_stride
            if form.is_state:
                first_block = token * blocks_each
            else:
                first_block, inside = divmod(token, form.block_tokens)
                at += inside * section.token_stride
            for number, byte in enumerate(content):
                block, offset = divmod(at + number, form.useful_bytes)
                blocks[first_block + block][offset] = byte
        memory.append(blocks)
    return memory
