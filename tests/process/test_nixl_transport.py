"""Real NIXL between real processes, over shared memory and over TCP."""

import signal
import time

import pytest

from tests.process.transport_process import (
    BLOCK_BYTES,
    BOUND_S,
    NUM_BLOCKS,
    World,
    ended,
    expected,
    pair,
    tcp_world,
    until,
    world,
)

__all__ = ["tcp_world", "world"]  # the fixtures

HANDLES_MAX = 16  # per peer
IDLE = {"failure": "", "reads": 0, "handles": 0, "oldest_ms": 0, "bytes": 0}


def test_reads_move_exactly_the_blocks_asked_for(world: World) -> None:
    owner, reader = pair(world, ends_itself=True)
    src = [7, 3, 60, 61, 62, 0, 33]  # scattered, with a run; 4 handles
    dst = [1, 63, 20, 21, 22, 5, 4]
    assert ended(reader, world.read(reader, owner.name, src, dst)) == ""

    want = [expected(reader.seed, block) for block in range(NUM_BLOCKS)]
    untouched = list(want)
    for source, destination in zip(src, dst, strict=True):
        want[destination] = expected(owner.seed, source)
    got = reader.digests()
    assert got == want
    assert got != untouched  # the comparison can fail
    assert owner.digests() == [expected(owner.seed, block) for block in range(NUM_BLOCKS)]

    everything = list(range(NUM_BLOCKS))
    assert ended(reader, world.read(reader, owner.name, everything, everything)) == ""
    assert reader.digests() == owner.digests()
    assert ended(reader, world.read(reader, owner.name, [], [])) == ""
    assert reader.state() == IDLE

    assert reader.close(timeout_s=BOUND_S) is True
    with pytest.raises(RuntimeError, match="RemoteFault: the KV transport has ended: closed"):
        world.read(reader, owner.name, [0], [0])
    reader.remove(name=owner.name)  # harmless
    assert [owner.end(), reader.end()] == [0, 0]


def test_neighbours_become_one_descriptor(world: World) -> None:
    owner, reader = pair(world, handle_bytes_max=NUM_BLOCKS * BLOCK_BYTES, telemetry=True)
    everything = list(range(NUM_BLOCKS))
    descending = everything[::-1]
    assert reader.counts()["descriptors"] == []
    for src, dst, num_descriptors in (
        (everything, everything, 1),
        (descending, descending, 1),  # the order within a read is the transport's to choose
        ([5, 6, 7, 20, 21], [1, 2, 3, 4, 5], 2),
        ([5, 6, 7, 8], [1, 2, 40, 41], 2),
        (everything, descending, NUM_BLOCKS),  # what cannot become one does not
    ):
        assert ended(reader, world.read(reader, owner.name, src, dst)) == ""
        counts = reader.counts()
        assert counts["descriptors"] == [num_descriptors]
        assert counts["bytes"] == [len(src) * BLOCK_BYTES]
    # Our own pool and the peer's, once, each as one strided row.
    assert counts["prepared"] == [1, 1]
    want = [expected(owner.seed, block) for block in descending]
    assert reader.digests() == want != want[::-1]


def test_handles_are_equal_and_bytes_in_progress_are_bounded(tcp_world: World) -> None:
    mib = 1 << 20
    large = {"block_bytes": 2 * mib, "handle_bytes_max": 16 * mib, "telemetry": True}
    owner, reader = pair(tcp_world, **large)
    everything = list(range(NUM_BLOCKS))  # 128 MiB
    assert ended(reader, tcp_world.read(reader, owner.name, everything[:9], everything[:9])) == ""
    assert sorted(reader.counts()["bytes"]) == [8 * mib, 10 * mib]  # not 16 and 2

    owner.signal(signal.SIGSTOP)
    stuck = tcp_world.read(reader, owner.name, everything, everything)
    state = until(reader, lambda s: s["bytes"] == 16 * mib)
    before_ms = reader.cpu_ms()
    assert reader.wait(read_id=stuck, timeout_s=1.0) == []
    used_ms = reader.cpu_ms() - before_ms
    assert used_ms < 300, "an owner that is silent costs a core"
    state = reader.state()
    assert state["bytes"] == 16 * mib
    assert state["handles"] == 1  # until it is known how fast the owner is

    owner.signal(signal.SIGCONT)
    assert ended(reader, stuck) == ""
    counts = reader.counts()
    assert counts["bytes"] == [16 * mib] * 8
    assert counts["descriptors"] == [1] * 8
    assert reader.digests() == owner.digests()
    assert reader.state() == IDLE


def test_what_cannot_be_read_is_an_error_not_a_hang(world: World) -> None:
    owner, reader = pair(world)
    other = world.start("narrow:1", seed=3, block_bytes=1024).ready()
    before = reader.digests()
    assert "nobody:1 is unknown" in ended(reader, world.read(reader, "nobody:1", [0], [0]))

    outside = world.read(reader, owner.name, [0, NUM_BLOCKS], [0, 1])
    assert "outside the pool of owner:1" in ended(reader, outside)
    with pytest.raises(RuntimeError, match="ValueError: a destination block lies outside"):
        world.read(reader, owner.name, [0], [NUM_BLOCKS])
    with pytest.raises(RuntimeError, match="ValueError: 2 source and 1 destination"):
        world.read(reader, owner.name, [0, 1], [0])

    reader.add(name=other.name, info=other.info)
    assert "1024 bytes, not 4096" in ended(reader, world.read(reader, other.name, [0], [0]))
    reader.add(name="owner:2", info=owner.info)  # another epoch's metadata
    assert "names 'owner:1'" in ended(reader, world.read(reader, "owner:2", [0], [0]))
    reader.add(name="junk:1", info={**owner.info, "transport_metadata": b"junk".hex()})
    assert "adding junk:1" in ended(reader, world.read(reader, "junk:1", [0], [0]))
    reader.add(name=reader.name, info=reader.info)
    assert "from itself" in ended(reader, world.read(reader, reader.name, [0], [1]))

    reader.remove(name=owner.name)
    assert "is unknown" in ended(reader, world.read(reader, owner.name, [0], [0]))
    assert reader.digests() == before
    reader.add(name=owner.name, info=owner.info)
    assert ended(reader, world.read(reader, owner.name, [0], [0])) == ""


def test_owner_killed_and_restarted(world: World) -> None:
    owner, reader = pair(world)
    other = world.owner("other:1", seed=3)
    reader.add(name=other.name, info=other.info)
    assert ended(reader, world.read(reader, owner.name, [0], [0])) == ""

    owner.signal(signal.SIGKILL)  # while idle
    begin_s = time.monotonic()
    error = ended(reader, world.read(reader, owner.name, [1], [1]))
    assert "nixl" in error
    assert time.monotonic() - begin_s < 10
    assert ended(reader, world.read(reader, other.name, [5], [6])) == ""
    assert reader.digests()[6] == expected(other.seed, 5)

    again = world.owner("owner:2", seed=4)  # the same worker, a new epoch
    reader.add(name=again.name, info=again.info)
    assert ended(reader, world.read(reader, again.name, [2], [2])) == ""
    assert reader.digests()[2] == expected(again.seed, 2)
    assert ended(reader, world.read(reader, owner.name, [1], [1])) != ""
    reader.remove(name=owner.name)
    assert ended(reader, world.read(reader, again.name, [3], [3])) == ""

    # While reads are under way: each ends exactly once, and one that went well is complete.
    everything = list(range(NUM_BLOCKS))
    reads = [world.read(reader, again.name, everything, everything) for _ in range(50)]
    again.signal(signal.SIGKILL)
    errors = [ended(reader, read) for read in reads]
    if errors[0] == "":
        assert reader.digests() == [expected(again.seed, block) for block in everything]
    assert ended(reader, world.read(reader, again.name, [0], [0])) != ""
    assert ended(reader, world.read(reader, other.name, [9], [9])) == ""
    assert reader.state()["handles"] == 0


def test_broken_connections_are_made_anew(tcp_world: World) -> None:
    owner, reader = pair(tcp_world)
    assert ended(reader, tcp_world.read(reader, owner.name, [0], [0])) == ""
    assert reader.cut() > 0
    everything = list(range(NUM_BLOCKS))
    broken = tcp_world.read(reader, owner.name, everything, everything)
    assert "nixl" in ended(reader, broken)
    by_s = time.monotonic() + BOUND_S
    while error := ended(reader, tcp_world.read(reader, owner.name, everything, everything)):
        assert time.monotonic() < by_s, error
    assert reader.digests() == owner.digests()


def test_stopped_owner_blocks_nobody_else(tcp_world: World) -> None:
    owner, reader = pair(tcp_world)
    other = tcp_world.owner("other:1", seed=3)
    reader.add(name=other.name, info=other.info)
    assert ended(reader, tcp_world.read(reader, owner.name, [0], [0])) == ""

    owner.signal(signal.SIGSTOP)
    everything = list(range(NUM_BLOCKS))  # 32 handles, of which 16 may be in progress
    stuck = tcp_world.read(reader, owner.name, everything, everything)
    until(reader, lambda s: s["handles"] == HANDLES_MAX and s["oldest_ms"] > 300)
    assert ended(reader, tcp_world.read(reader, other.name, [5], [6])) == ""
    assert reader.wait(read_id=stuck, timeout_s=0.1) == []

    owner.signal(signal.SIGCONT)
    assert ended(reader, stuck) == ""
    assert reader.digests() == [expected(owner.seed, block) for block in everything]


def test_owner_killed_with_reads_in_progress(tcp_world: World) -> None:
    owner, reader = pair(tcp_world)
    assert ended(reader, tcp_world.read(reader, owner.name, [0], [0])) == ""
    owner.signal(signal.SIGSTOP)
    everything = list(range(NUM_BLOCKS))
    reads = [tcp_world.read(reader, owner.name, everything, everything) for _ in range(2)]
    until(reader, lambda s: s["handles"] == HANDLES_MAX)
    owner.signal(signal.SIGKILL)
    begin_s = time.monotonic()
    assert all("nixl" in ended(reader, read) for read in reads)
    assert time.monotonic() - begin_s < 10
    assert reader.state() == IDLE


def test_removal_waits_for_what_is_in_progress(tcp_world: World) -> None:
    owner, reader = pair(tcp_world)
    assert ended(reader, tcp_world.read(reader, owner.name, [0], [0])) == ""
    owner.signal(signal.SIGSTOP)
    posted = tcp_world.read(reader, owner.name, [1], [1])
    until(reader, lambda s: s["handles"] == 1)
    everything = list(range(NUM_BLOCKS))
    partly = tcp_world.read(reader, owner.name, everything, everything)
    until(reader, lambda s: s["handles"] == HANDLES_MAX)
    waiting = tcp_world.read(reader, owner.name, [2], [2])
    reader.remove(name=owner.name)
    assert "was removed" in ended(reader, waiting)
    refused = tcp_world.read(reader, owner.name, [3], [3])
    assert "is unknown" in ended(reader, refused)
    reader.add(name=owner.name, info=owner.info)  # its stream came back
    later = tcp_world.read(reader, owner.name, [4], [5])
    for read in (posted, partly, later):
        assert reader.wait(read_id=read, timeout_s=0.1) == []

    owner.signal(signal.SIGCONT)
    assert ended(reader, posted) == ""
    assert "was removed" in ended(reader, partly)
    assert ended(reader, later) == ""
    assert reader.digests()[5] == expected(owner.seed, 4)


@pytest.mark.parametrize("wake", [True, False])
def test_close_never_gives_up_what_is_in_progress(tcp_world: World, wake: bool) -> None:
    owner, reader = pair(tcp_world, ends_itself=True)
    assert ended(reader, tcp_world.read(reader, owner.name, [0], [0])) == ""
    owner.signal(signal.SIGSTOP)
    stuck = tcp_world.read(reader, owner.name, [1], [1])
    until(reader, lambda s: s["handles"] == 1)
    assert reader.close(timeout_s=0.3) is False
    refused = tcp_world.read(reader, owner.name, [2], [2])
    assert "closing" in ended(reader, refused)
    assert reader.wait(read_id=stuck, timeout_s=0.1) == []
    if wake:
        owner.signal(signal.SIGCONT)
        assert ended(reader, stuck) == ""
        assert reader.close(timeout_s=BOUND_S) is True
    assert reader.end() == 0  # also with a READ in progress
