"""Blocks in several parts over real NIXL: where an engine's layers lie apart."""

from tests.process.transport_process import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    World,
    ended,
    expected,
    pair,
    world,
)

__all__ = ["world"]  # the fixture


def test_every_part_of_a_block_moves(world: World) -> None:
    """Where layers lie apart: the parts of neighbours are still one descriptor."""
    num_parts, whole = 4, NUM_BLOCKS * BLOCK_BYTES
    owner, reader = pair(world, num_parts=num_parts, handle_bytes_max=whole, telemetry=True)
    src, dst = [5, 6, 7, 20, 63, 0], [1, 2, 3, 4, 63, 9]
    assert ended(reader, world.read(reader, owner.name, src, dst)) == ""
    want = [expected(reader.seed, block) for block in range(NUM_BLOCKS)]
    for source, destination in zip(src, dst, strict=True):
        want[destination] = expected(owner.seed, source)
    assert reader.digests() == want
    counts = reader.counts()
    assert counts["bytes"] == [len(src) * BLOCK_BYTES]
    assert counts["descriptors"] == [num_parts * 4]  # of runs 5..7, 20, 63 and 0
    assert counts["prepared"] == [num_parts, num_parts]
