"""A step as index tensors: where new KV goes, and what each query may read."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from disagg.kv.blocks.block_pool import NULL_BLOCK
from disagg.kv.kinds.kind import AttentionPages, Spec
from disagg.scheduling.block_tables import Tables
from disagg.scheduling.step import SequenceSlice
from disagg.workers.engines.native.paged_pool import LayerCache
from disagg.workers.engines.native.state_batch import StateCall, StateGroup, state_calls

QUERY_TILE_TOKENS = 512
"""A prefill chunk is attended in tiles of so many queries, which bounds mask and score memory."""

DECODE_TILE_SLOTS = 8192
"""Single queries are attended in tiles of at most so many slots, each KV head counted, or of one
sequence. What is gathered for one (4 MiB in fp32 with heads of 64) lies in memory that is at hand:
the allocator takes fresh pages for more than 32 MiB, which took longer than the attention."""

Ints = npt.NDArray[np.int64]

DecodeRow = tuple[int, Ints, int, int]
"""A single query: packed row, its blocks, slots to skip in the first of them, number of keys."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillTile:
    """Consecutive queries of one sequence and the keys they may see.

    ``rows`` are the packed queries. Their keys are the ``num_keys`` tokens that begin ``skip``
    tokens into the first of ``block_ids``; ``mask`` [queries, num_keys] is True where allowed.
    """

    rows: slice
    block_ids: torch.Tensor
    skip: int
    num_keys: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBucket:
    """Single queries of several sequences with similar numbers of keys.

    ``rows`` [S] are the packed queries, ``block_ids`` [S, n] the blocks with their keys; sequences
    with fewer blocks repeat their last one. Of the n * block_tokens slots ``mask`` [S, 1, 1, slots]
    allows those that hold keys; ``holes`` are the others, as rows of the gathered
    [2, S, num_kv_heads, slots], of latents [1, S, 1, slots]: they must be cleared, as they may
    hold NaN, and NaN times a zero weight is NaN.
    """

    rows: torch.Tensor
    block_ids: torch.Tensor
    mask: torch.Tensor
    holes: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GroupBatch:
    """What the layers of one KV cache group do in a step.

    ``write_blocks`` and ``write_offsets`` [T] are the pool slots of the packed new tokens.
    """

    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    tiles: tuple[PrefillTile, ...]
    decodes: tuple[DecodeBucket, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """One forward pass over all slices of a step; valid for that pass only.

    ``input_ids`` and ``positions`` are [1, T]; ``sampled_rows`` are the packed rows whose logits
    are sampled, of a slice those of its last known token and of its drafts; ``sampled`` are the
    indices of the slices that have some. ``unknown`` are the packed rows of
    placeholders, by the indices of their slices. ``tables`` are those of the sequences.
    """

    num_slices: int
    tables: Tables = field(repr=False)
    input_ids: torch.Tensor = field(repr=False)
    unknown: Mapping[int, int]
    positions: torch.Tensor
    sampled_rows: torch.Tensor
    sampled: tuple[int, ...]
    groups: Mapping[int, GroupBatch]
    states: Mapping[int, tuple[StateCall, ...]]
    layers: Mapping[int, LayerCache]

    def put_tokens(self, slices: Sequence[SequenceSlice]) -> None:
        """Put in the tokens that were placeholders when the batch was built."""
        if self.unknown:
            token_ids = [slices[index].token_ids[0] for index in self.unknown]
            known = torch.tensor(token_ids, device=self.input_ids.device)
            self.input_ids[0, list(self.unknown.values())] = known


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What of a group decides which slots are read."""

    spec: Spec
    pages: AttentionPages

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.spec.block_tokens

    def first_seen(self, position: int) -> int:
        """First position whose KV a query at ``position`` reads; never falls."""
        return self.spec.first_seen(position) or 0


class BatchBuilder:
    """Turns slices into a packed batch; keeps no state between steps.

    A batch is built while the one before it is computed: numpy does it on this thread alone, where
    torch would take the cores for its threads.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerCache],
        groups: Sequence[GroupShape | StateGroup],
        *,
        vocab_size: int,
        max_model_tokens: int,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._groups = tuple(groups)
        self._vocab_size = vocab_size
        self._max_model_tokens = max_model_tokens
        self._device = device

    def build(self, slices: Sequence[SequenceSlice], tables: Tables) -> PackedBatch:
        """Check the slices and lay out their packed forward pass.

        Args:
            slices: what is computed; a token may be a `PLACEHOLDER`.
            tables: where the KV of their sequences lies, the step's changes included.

        Raises:
            ValueError: the slices name what must not be computed: tokens out of range, a read
                or write of the null block, or two tokens in one slot. Nothing was changed.
        """
        if not slices:
            raise ValueError("a step without slices")
        tokens: list[Ints] = []
        positions: list[Ints] = []
        unknown: list[int] = []
        for index, part in enumerate(slices):
            ids = np.asarray(part.token_ids, dtype=np.int64)
            end = part.start + len(ids)
            if not len(ids) or part.start < 0 or end > self._max_model_tokens:
                raise ValueError(
                    f"slice {index}: positions {part.start}..{end} do not lie in "
                    f"0..{self._max_model_tokens}, or are none"
                )
            if not 0 <= part.num_drafts < len(ids):
                raise ValueError(f"slice {index}: {part.num_drafts} drafts of {len(ids)} tokens")
            if part.is_placeholder:
                unknown.append(index)
            elif ids.min() < 0 or ids.max() >= self._vocab_size:
                raise ValueError(f"slice {index}: token id out of 0..{self._vocab_size - 1}")
            tokens.append(ids)
            positions.append(np.arange(part.start, end))
        lengths = [len(ids) for ids in tokens]
        ends = np.cumsum(lengths)
        sampled = tuple(i for i, part in enumerate(slices) if part.sampling is not None)
        groups: dict[int, GroupBatch] = {}
        states: dict[int, tuple[StateCall, ...]] = {}
        written, first_rows = [], (ends - lengths).tolist()
        for number, shape in enumerate(self._groups):
            blocks = [tables[part.key][number] for part in slices]
            if isinstance(shape, StateGroup):
                states[number], left = state_calls(
                    number, shape, slices, blocks, first_rows, self._tensor
                )
                slots = left << 32
            else:
                groups[number], slots = self._group(number, shape, slices, blocks, first_rows)
            written.append(slots)
        all_written = np.concatenate(written)
        if len(np.unique(all_written)) != len(all_written):
            raise ValueError("two tokens of the step would be written to one slot")
        return PackedBatch(
            num_slices=len(slices),
            tables=tables,
            input_ids=self._tensor(np.concatenate(tokens))[None],
            unknown={index: first_rows[index] for index in unknown},
            positions=self._tensor(np.concatenate(positions))[None],
            sampled_rows=self._tensor(_sampled_rows(slices, sampled, ends)),
            sampled=sampled,
            groups=groups,
            states=states,
            layers=self._layers,
        )

    def _group(
        self,
        number: int,
        shape: GroupShape,
        slices: Sequence[SequenceSlice],
        tables: "Sequence[array[int]]",
        first_rows: list[int],
    ) -> tuple[GroupBatch, Ints]:
        blocks, offsets = [], []
        tiles: list[PrefillTile] = []
        buckets: dict[int, list[DecodeRow]] = {}
        for index, (part, row) in enumerate(zip(slices, first_rows, strict=True)):
            where = f"slice {index}, group {number}"
            num_tokens = len(part.token_ids)
            end = part.start + num_tokens
            first = shape.first_seen(part.start)
            first_block = first // shape.block_tokens
            table = _entries(tables[index], first_block, -(-end // shape.block_tokens), where)
            new = np.arange(part.start, end)
            blocks.append(table[new // shape.block_tokens - first_block])
            offsets.append(new % shape.block_tokens)
            if num_tokens == 1:
                buckets.setdefault((len(table) - 1).bit_length(), []).append(
                    (row, table, first - first_block * shape.block_tokens, end - first)
                )
            else:
                tiles += self._tiles(part.start, end, row, shape, table)
        write_blocks, write_offsets = np.concatenate(blocks), np.concatenate(offsets)
        batch = GroupBatch(
            write_blocks=self._tensor(write_blocks),
            write_offsets=self._tensor(write_offsets),
            tiles=tuple(tiles),
            decodes=tuple(
                self._bucket(tile, shape)
                for _, rows in sorted(buckets.items())
                for tile in _tiled(rows, shape)
            ),
        )
        # Blocks of all groups come from one pool, and a block never serves two groups: slots of
        # any two groups can be compared once the offset is left in a field of its own.
        return batch, (write_blocks << 32) + write_offsets

    def _tiles(
        self, start: int, end: int, row: int, shape: GroupShape, table: Ints
    ) -> list[PrefillTile]:
        size = shape.block_tokens
        table_first = shape.first_seen(start) // size
        tiles = []
        for lo in range(start, end, QUERY_TILE_TOKENS):
            hi = min(end, lo + QUERY_TILE_TOKENS)
            first = shape.first_seen(lo)
            key = np.arange(first, hi)
            mask = key <= np.arange(lo, hi)[:, None]
            if shape.first_seen(hi - 1) > first:
                seen = np.fromiter(map(shape.first_seen, range(lo, hi)), np.int64, hi - lo)
                mask &= key >= seen[:, None]
            block_lo, block_hi = first // size - table_first, -(-hi // size) - table_first
            tiles.append(
                PrefillTile(
                    rows=slice(row + lo - start, row + hi - start),
                    block_ids=self._tensor(table[block_lo:block_hi]),
                    skip=first % size,
                    num_keys=hi - first,
                    mask=self._tensor(mask),
                )
            )
        return tiles

    def _bucket(self, rows: list[DecodeRow], shape: GroupShape) -> DecodeBucket:
        most = max(len(table) for _, table, _, _ in rows)
        block_ids = np.empty((len(rows), most), dtype=np.int64)
        for padded, (_, table, _, _) in zip(block_ids, rows, strict=True):
            padded[: len(table)] = table
            padded[len(table) :] = table[-1]
        slots = np.arange(most * shape.block_tokens)
        skips = np.array([skip for _, _, skip, _ in rows])[:, None]
        num_keys = np.array([count for _, _, _, count in rows])[:, None]
        mask = (slots >= skips) & (slots < skips + num_keys)
        pages = shape.pages
        gathered = (1 + pages.has_values, len(rows), pages.num_kv_heads, len(slots))
        return DecodeBucket(
            rows=self._tensor(np.array([row for row, _, _, _ in rows])),
            block_ids=self._tensor(block_ids),
            mask=self._tensor(mask)[:, None, None],
            holes=self._tensor(np.flatnonzero(np.broadcast_to(~mask[:, None], gathered))),
        )

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _sampled_rows(slices: Sequence[SequenceSlice], sampled: Sequence[int], ends: Ints) -> Ints:
    rows: list[int] = []
    for index in sampled:
        rows += range(ends[index] - 1 - slices[index].num_drafts, ends[index])
    return np.array(rows, np.int64)


def _tiled(rows: list[DecodeRow], shape: GroupShape) -> Iterator[list[DecodeRow]]:
    """Divide a bucket into tiles of DECODE_TILE_SLOTS."""
    longest = max(len(table) for _, table, _, _ in rows)
    most = longest * shape.block_tokens * shape.pages.num_kv_heads
    size = max(1, DECODE_TILE_SLOTS // most)
    return (rows[at : at + size] for at in range(0, len(rows), size))


def _entries(table: "array[int]", first: int, last: int, where: str) -> Ints:
    """Block ids of block indexes ``first .. last``, all of them real blocks."""
    entries = np.frombuffer(table[first:last], dtype=np.int64)
    if len(entries) != last - first:
        raise ValueError(f"{where}: the block table ends before block index {last - 1}")
    if not entries.all():
        block_index = first + int(np.argmin(entries != NULL_BLOCK))
        raise ValueError(f"{where}: null block at in-window block index {block_index}")
    return entries
