"""What every rank reads, in bytes of the pools: the plan's ranges where their blocks lie."""

import random

from hypothesis import given
from hypothesis import strategies as st

from disagg.transfer.read_plan import BlockRange
from disagg.wire.stream_hello import PoolInfo
from disagg.workers.part_reads import PartReads
from tests.unit.transfer import test_read_plan as hand
from tests.unit.transfer.forms import Case, Side, cases
from tests.unit.transfer.test_read_plan import planned

PADDING, NUM_BLOCKS = 5, 40
Bytes = set[tuple[int, int, int, int]]
"""(rank of the peer, byte of its pool, rank here, byte of the pool here)."""


def bytes_of(ranges: list[BlockRange], src_bytes: int, dst_bytes: int) -> Bytes:
    return {
        (
            one.src_rank,
            one.src_block * src_bytes + one.src_offset + byte,
            one.dst_rank,
            one.dst_block * dst_bytes + one.dst_offset + byte,
        )
        for one in ranges
        for byte in range(one.num_bytes)
    }


@given(case=cases(), seed=st.integers(0, 1 << 30))
def test_the_ranks_together_read_what_is_planned(case: Case, seed: int) -> None:
    rng = random.Random(seed)
    plan = planned(case)
    (group,) = plan.groups
    src_bytes = case.owner.form.useful_bytes + PADDING
    dst_bytes = case.reader.form.useful_bytes + PADDING
    pools = [PoolInfo(b"", 0, NUM_BLOCKS, src_bytes, "DRAM", 0)] * case.owner.num_ranks
    agents = [f"peer/{rank}" for rank in range(len(pools))]
    cells = [
        (
            rng.sample(range(NUM_BLOCKS), group.src_blocks),
            rng.sample(range(n * 16, n * 16 + 16), group.dst_blocks),
        )
        for n in range(2)
    ]
    posted = [
        (owners[at], readers[to], (0, number))
        for owners, readers in cells
        for number, (at, to) in enumerate(group.pairs)
    ]
    rng.shuffle(posted)
    src, dst, parts = zip(*posted, strict=True)
    found: Bytes = set()
    num_bytes = 0
    for rank in range(case.reader.num_ranks):
        reads = PartReads.of(plan, rank, agents, pools)
        ranges = reads.ranges(src, dst, parts, dst_bytes)
        assert set(ranges) <= set(reads.ranks)
        for source, (from_, to, lengths) in ranges.items():
            assert list(from_) == sorted(from_)
            for start, target, length in zip(from_, to, lengths, strict=True):
                num_bytes += int(length)
                found |= {
                    (source, int(start) + n, rank, int(target) + n) for n in range(int(length))
                }
    assert found == bytes_of(plan.reads(0, cells), src_bytes, dst_bytes)
    assert num_bytes == len(found)  # nothing twice


def test_neighbours_are_one_range() -> None:
    """Of one rank and one form all is one piece, block after block, if the pools allow it."""
    owner, reader = Side(hand._PLAIN, 2), Side(hand._PLAIN, 2)
    plan = hand.planned(Case((), owner, reader))
    size = hand._PLAIN.useful_bytes
    pools = [PoolInfo(b"", 0, 8, size, "DRAM", 0)] * 2
    reads = PartReads.of(plan, 1, ["a/0", "a/1"], pools)
    ((rank, (src, dst, lengths)),) = reads.ranges([3, 4, 6], [1, 2, 3], [(0, 0)] * 3, size).items()
    assert rank == 1
    assert (list(src), list(dst)) == ([3 * size, 6 * size], [size, 3 * size])
    assert list(lengths) == [2 * size, size]
