"""How the KV of one group lies in a worker's blocks, so that unequal workers can exchange it.

The canonical block of a group is the full, unsharded tensor: per layer, section, head and token a
fixed number of bytes. A rank has some of the heads, a block some of the tokens; a form says where.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor of a layer's page, or of its state: K, V, latents, a recurrent state.

    Attributes:
        name: pairs it with the other worker's section.
        offset: of its first byte in the page of a rank.
        num_heads: of the whole model; 1 for what every rank has whole, such as latents.
        heads_per_rank: consecutive ones; where there are more ranks than heads, several have one.
        head_stride: bytes from a head to the next.
        token_stride: bytes from a token to the next; 0 where the tokens of a block cannot be taken
            apart, and for states, which have none.
        unit_bytes: bytes of one head of one token; of one head where ``token_stride`` is 0.
    """

    name: str
    offset: int
    num_heads: int
    heads_per_rank: int
    head_stride: int
    token_stride: int
    unit_bytes: int

    def first_head(self, rank: int, num_ranks: int) -> int:
        """Number of a rank's first head among the model's."""
        return rank * self.num_heads // num_ranks

    def end(self, block_tokens: int) -> int:
        """Offset after its last byte."""
        num_tokens = block_tokens if self.token_stride else 1
        last = (self.heads_per_rank - 1) * self.head_stride + (num_tokens - 1) * self.token_stride
        return self.offset + last + self.unit_bytes


@dataclass(frozen=True, slots=True)
class GroupForm:
    """Where a group's KV lies in the blocks of one rank; the same on every rank of a worker.

    A layer's page begins at ``slot * page_bytes``; the pages of a state of several blocks are laid
    end to end and cut every ``useful_bytes``.

    Attributes:
        kind: of the group.
        block_tokens: tokens per block; of states, the distance at which they can be kept.
        window_tokens: window or chunk; 0 where the kind has none.
        is_state: a block, or several, is one state and has no tokens.
        layers: numbers of the layers, by slot.
        page_bytes: of one layer.
        blocks_per_state: blocks of one state; 1 for other kinds.
        useful_bytes: of a block.
        sections: of every page; none where the engine does not say how its pages lie.
    """

    kind: str
    block_tokens: int
    window_tokens: int
    is_state: bool
    layers: tuple[int, ...]
    page_bytes: int
    blocks_per_state: int
    useful_bytes: int
    sections: tuple[Section, ...]


def form_mismatches(
    ours: Sequence[GroupForm], our_ranks: int, theirs: Sequence[GroupForm], their_ranks: int
) -> tuple[str, ...]:
    """Why blocks of one form cannot be read as parts of the other's: field, ours and theirs."""
    if len(ours) != len(theirs) or not ours:
        return (f"forms: {len(ours)} and {len(theirs)} groups say how their blocks lie",)
    return tuple(
        f"group {number}: {problem}"
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True))
        for problem in _group_mismatches(one, our_ranks, other, their_ranks)
    )


def _group_mismatches(
    ours: GroupForm, our_ranks: int, theirs: GroupForm, their_ranks: int
) -> Iterator[str]:
    for name in ("kind", "window_tokens", "is_state", "layers"):
        if getattr(ours, name) != getattr(theirs, name):
            yield f"{name} {getattr(ours, name)!r} != {getattr(theirs, name)!r}"
    small, large = sorted((ours.block_tokens, theirs.block_tokens))
    if small < 1 or large % small:
        yield f"block_tokens {ours.block_tokens}, {theirs.block_tokens}: neither divides the other"
    if not ours.sections or not theirs.sections:
        which = "neither" if not ours.sections and not theirs.sections else "only one of them"
        yield f"sections: {which} says how its pages lie"
        return
    for who, form, num_ranks in (("ours", ours, our_ranks), ("theirs", theirs, their_ranks)):
        for problem in _problems(form, num_ranks):
            yield f"{who}: {problem}"
    names = [tuple(section.name for section in form.sections) for form in (ours, theirs)]
    if names[0] != names[1]:
        yield f"sections {names[0]!r} != {names[1]!r}"
        return
    for one, other in zip(ours.sections, theirs.sections, strict=True):
        for field in ("num_heads", "unit_bytes"):
            if getattr(one, field) != getattr(other, field):
                values = f"{getattr(one, field)} != {getattr(other, field)}"
                yield f"section {one.name}: {field} {values}"
        if bool(one.token_stride) != bool(other.token_stride):
            yield f"section {one.name}: token_stride {one.token_stride} != {other.token_stride}"
        elif not one.token_stride and not ours.is_state and small != large:
            values = f"{ours.block_tokens} != {theirs.block_tokens}"
            yield f"section {one.name}: block_tokens {values}, and its tokens lie together"


def _problems(form: GroupForm, num_ranks: int) -> Iterator[str]:
    """What in a form contradicts itself; ranges planned from it would leave its blocks."""
    unit_bytes = len(form.layers) * form.page_bytes
    if form.blocks_per_state < 1 or unit_bytes > form.blocks_per_state * form.useful_bytes:
        yield f"{unit_bytes} bytes in {form.blocks_per_state} x {form.useful_bytes}"
    for section in form.sections:
        heads = section.num_heads
        shared = max(1, heads // num_ranks) if num_ranks and heads > 0 else 0
        even = shared and (heads % num_ranks == 0 or num_ranks % heads == 0)
        if not even or section.heads_per_rank != shared:
            yield (
                f"section {section.name}: {heads} heads over {num_ranks} ranks,"
                f" {section.heads_per_rank} on each"
            )
        sizes = (section.offset, section.head_stride, section.token_stride)
        if min(sizes) < 0 or section.unit_bytes < 1:
            yield f"section {section.name}: a size below its least"
        elif section.end(form.block_tokens) > form.page_bytes:
            yield f"section {section.name}: ends after its page of {form.page_bytes} bytes"
