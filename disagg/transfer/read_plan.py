"""From two workers' contracts to the bytes that move: parts of the same canonical blocks.

Workers whose blocks hold other numbers of tokens, or are shared by other numbers of ranks, have the
same canonical block (see `disagg/messages/forms.py`) and each its own cut of it. A *cell* is the
smallest piece that is whole blocks on both sides: the tokens of the larger block, or one state.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from disagg.errors import ConfigError
from disagg.messages.forms import GroupForm, Section
from disagg.messages.registration import Contract

Pair = tuple[int, int]
"""A block of the owner's and one of the reader's, both counted within their cell."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of one of the owner's blocks, and where they go in one of the reader's."""

    src_rank: int
    src_offset: int
    dst_rank: int
    dst_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BlockRange:
    """The same in blocks of the pools."""

    src_rank: int
    src_block: int
    src_offset: int
    dst_rank: int
    dst_block: int
    dst_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GroupReads:
    """How blocks of one group are read.

    Attributes:
        is_state: a cell is one state and no tokens.
        block_tokens: of an owner's block.
        src_blocks, dst_blocks: of a cell: the owner's and the reader's.
        pairs: which block of a cell is read into which, ascending.
        ranges: of each pair, ascending by destination; as few as there can be.
    """

    is_state: bool
    block_tokens: int
    src_blocks: int
    dst_blocks: int
    pairs: tuple[Pair, ...]
    ranges: Mapping[Pair, tuple[ByteRange, ...]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How a worker reads another's blocks in parts, group by group."""

    groups: tuple[GroupReads, ...]

    def reads(
        self, group: int, cells: Sequence[tuple[Sequence[int | None], Sequence[int | None]]]
    ) -> list[BlockRange]:
        """The byte ranges of some cells of a group.

        Args:
            group: its number.
            cells: the owner's block ids of each, and the reader's; None where one has no block or
                needs none.
        """
        reads = self.groups[group]
        return [
            BlockRange(
                one.src_rank, src, one.src_offset, one.dst_rank, dst, one.dst_offset, one.num_bytes
            )
            for owners, readers in cells
            for (at, to), ranges in reads.ranges.items()
            if (src := owners[at]) is not None and (dst := readers[to]) is not None
            for one in ranges
        ]


def plan_reads(owner: Contract, reader: Contract) -> ReadPlan | None:
    """How ``reader`` reads blocks of ``owner``; None: whole ones, rank by rank.

    Raises:
        ConfigError: it cannot; names every field that differs, the reader's and the owner's.
    """
    if mismatches := reader.mismatches(owner):
        raise ConfigError(
            f"no KV moves between contracts that differ: {'; '.join(mismatches)}", param="contract"
        )
    if reader.has_equal_blocks(owner):
        return None
    return ReadPlan(
        tuple(
            _group_reads(theirs, owner.num_ranks, ours, reader.num_ranks)
            for theirs, ours in zip(owner.forms, reader.forms, strict=True)
        )
    )


def _group_reads(
    owner: GroupForm, owner_ranks: int, reader: GroupForm, reader_ranks: int
) -> GroupReads:
    cell_tokens = max(owner.block_tokens, reader.block_tokens)
    if owner.is_state:
        src_blocks, dst_blocks = owner.blocks_per_state, reader.blocks_per_state
    else:
        src_blocks = cell_tokens // owner.block_tokens
        dst_blocks = cell_tokens // reader.block_tokens
    found: dict[Pair, list[ByteRange]] = defaultdict(list)
    for src_rank, src_at, dst_rank, dst_at, num_bytes in _runs(
        owner, owner_ranks, reader, reader_ranks, cell_tokens
    ):
        for (at, src), (to, dst), size in _cut(owner, src_at, reader, dst_at, num_bytes):
            found[at, to].append(ByteRange(src_rank, src, dst_rank, dst, size))
    ranges = {pair: tuple(_merged(found[pair])) for pair in sorted(found)}
    return GroupReads(
        owner.is_state, owner.block_tokens, src_blocks, dst_blocks, tuple(ranges), ranges
    )


_Place = tuple[int, int]
"""A block of the cell, and a byte: in that block, or of a state in all of its blocks from there."""


def _runs(
    owner: GroupForm, owner_ranks: int, reader: GroupForm, reader_ranks: int, cell_tokens: int
) -> Iterator[tuple[int, _Place, int, _Place, int]]:
    """Pieces of a cell that lie in one piece on both sides, head by head, in no order."""
    for ours, theirs in zip(reader.sections, owner.sections, strict=True):
        for dst_rank in range(reader_ranks):
            for dst_head in range(ours.heads_per_rank):
                head = ours.first_head(dst_rank, reader_ranks) + dst_head
                src_rank = _rank_with(theirs, owner_ranks, head, dst_rank)
                src_head = head - theirs.first_head(src_rank, owner_ranks)
                for token, num_tokens in _token_runs(owner, theirs, reader, ours, cell_tokens):
                    num_bytes = num_tokens * ours.unit_bytes
                    src = _place(owner, theirs, src_head, token)
                    dst = _place(reader, ours, dst_head, token)
                    for slot in range(len(reader.layers)):
                        src_at = src[0], src[1] + slot * owner.page_bytes
                        dst_at = dst[0], dst[1] + slot * reader.page_bytes
                        yield src_rank, src_at, dst_rank, dst_at, num_bytes


def _rank_with(section: Section, num_ranks: int, head: int, reader_rank: int) -> int:
    """A rank that has a head; where several have it, the readers' ranks take them in turn."""
    having = [
        rank
        for rank in range(num_ranks)
        if 0 <= head - section.first_head(rank, num_ranks) < section.heads_per_rank
    ]
    return having[reader_rank % len(having)]


def _token_runs(
    owner: GroupForm, theirs: Section, reader: GroupForm, ours: Section, cell_tokens: int
) -> Iterator[tuple[int, int]]:
    """(first token, number) of the runs of tokens that are adjacent in both blocks."""
    if not ours.token_stride:
        yield 0, 1
        return
    adjacent = ours.token_stride == theirs.token_stride == ours.unit_bytes
    step = min(owner.block_tokens, reader.block_tokens) if adjacent else 1
    for token in range(0, cell_tokens, step):
        yield token, step


def _place(form: GroupForm, section: Section, head: int, token: int) -> _Place:
    """Where a rank keeps a token of the cell, of one of its heads, in the first layer's page."""
    block, token = divmod(token, form.block_tokens) if section.token_stride else (0, 0)
    return block, section.offset + head * section.head_stride + token * section.token_stride


def _cut(
    owner: GroupForm, src: _Place, reader: GroupForm, dst: _Place, num_bytes: int
) -> Iterator[tuple[_Place, _Place, int]]:
    """Cut a run where a block of a state ends, on either side."""
    (at, src_byte), (to, dst_byte) = src, dst
    while num_bytes:
        src_block, src_offset = divmod(src_byte, owner.useful_bytes)
        dst_block, dst_offset = divmod(dst_byte, reader.useful_bytes)
        size = min(num_bytes, owner.useful_bytes - src_offset, reader.useful_bytes - dst_offset)
        yield (at + src_block, src_offset), (to + dst_block, dst_offset), size
        src_byte, dst_byte, num_bytes = src_byte + size, dst_byte + size, num_bytes - size


def _merged(ranges: list[ByteRange]) -> Iterator[ByteRange]:
    """The ranges of one pair of blocks, neighbours on both sides in one."""
    last: ByteRange | None = None
    for one in sorted(ranges, key=lambda r: (r.src_rank, r.dst_rank, r.dst_offset)):
        if last is not None and (
            (one.src_rank, one.src_offset - last.src_offset, one.dst_rank)
            == (last.src_rank, last.num_bytes, last.dst_rank)
            and one.dst_offset - last.dst_offset == last.num_bytes
        ):
            last = ByteRange(
                last.src_rank,
                last.src_offset,
                last.dst_rank,
                last.dst_offset,
                last.num_bytes + one.num_bytes,
            )
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last
