"""Reads of parts of blocks: which bytes of which rank's pool go where in this rank's pool."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.transfer.read_plan import ReadPlan
from disagg.wire.stream_hello import PoolInfo

Bytes = npt.NDArray[np.signedinteger[Any]]
"""Offsets into a pool, or lengths."""


@dataclass(frozen=True, slots=True, eq=False)
class PartReads:
    """What one rank reads of a peer whose blocks are not like its own.

    Args:
        agents: the peer's, by rank.
        pools: theirs.
        tables: per group and part the ranks to read from, each with the source offsets, destination
            offsets and lengths of its ranges.
    """

    agents: tuple[str, ...]
    pools: tuple[PoolInfo, ...]
    tables: Mapping[tuple[int, int], Mapping[int, tuple[Bytes, Bytes, Bytes]]]

    @classmethod
    def of(
        cls, plan: ReadPlan, rank: int, agents: Sequence[str], pools: Sequence[PoolInfo]
    ) -> "PartReads":
        """The part of a plan that concerns one rank of the reader."""
        tables: dict[tuple[int, int], dict[int, tuple[Bytes, Bytes, Bytes]]] = {}
        for group, reads in enumerate(plan.groups):
            for number, pair in enumerate(reads.pairs):
                ours = [one for one in reads.ranges[pair] if one.dst_rank == rank]
                tables[group, number] = {
                    source: (
                        _bytes([one.src_offset for one in ours if one.src_rank == source]),
                        _bytes([one.dst_offset for one in ours if one.src_rank == source]),
                        _bytes([one.num_bytes for one in ours if one.src_rank == source]),
                    )
                    for source in sorted({one.src_rank for one in ours})
                }
        return cls(tuple(agents), tuple(pools), tables)

    @property
    def ranks(self) -> list[int]:
        """Ranks of the peer that are read from."""
        return sorted({rank for of in self.tables.values() for rank in of})

    def ranges(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        parts: Sequence[tuple[int, int]],
        block_bytes: int,
    ) -> dict[int, tuple[Bytes, Bytes, Bytes]]:
        """Per rank of the peer: offsets in its pool, in ours, and lengths; by source.

        Args:
            src_blocks: ids at the peer.
            dst_blocks: ids here, as many.
            parts: group and part of each.
            block_bytes: of a block of ours.
        """
        src, dst, keys = _bytes(src_blocks), _bytes(dst_blocks), np.array(parts, dtype=np.int64)
        found: dict[int, list[tuple[Bytes, Bytes, Bytes]]] = {}
        for key in np.unique(keys, axis=0):
            chosen = (keys == key).all(axis=1)
            for rank, (from_, to, sizes) in self.tables[int(key[0]), int(key[1])].items():
                sources = src[chosen, None] * self.pools[rank].block_bytes + from_
                targets = dst[chosen, None] * block_bytes + to
                lengths = np.broadcast_to(sizes, sources.shape)
                found.setdefault(rank, []).append(
                    (sources.ravel(), targets.ravel(), lengths.ravel())
                )
        return {rank: _joined(pieces) for rank, pieces in found.items()}


def _bytes(numbers: Sequence[int]) -> Bytes:
    return np.asarray(numbers, dtype=np.int64)


def _joined(pieces: Sequence[tuple[Bytes, Bytes, Bytes]]) -> tuple[Bytes, Bytes, Bytes]:
    """All ranges by source, neighbours on both sides in one."""
    src, dst, sizes = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = src.argsort(kind="stable")
    src, dst, sizes = src[order], dst[order], sizes[order]
    apart = (src[1:] != (src + sizes)[:-1]) | (dst[1:] != (dst + sizes)[:-1])
    starts = np.flatnonzero(np.concatenate(([True], apart)))
    return src[starts], dst[starts], np.add.reduceat(sizes, starts)
