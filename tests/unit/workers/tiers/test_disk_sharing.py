"""A disk tier's directory that threads and processes share: bounds hold, no wrong byte is read."""

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from disagg.workers.tiers.disk_store import (
    CLOCKS_APART_NS,
    LOCK_FILE,
    PARTIAL_OLD_NS,
    PARTIAL_PREFIX,
    DiskStore,
)
from disagg.workers.tiers.stored_block import block_name
from tests.unit.workers.tiers.stored_blocks import (
    BLOCK_BYTES,
    CONTRACT,
    FILE_BYTES,
    FOREIGN,
    Clock,
    disk_tier,
    files_in,
    key_of,
    on_threads,
    path_of,
    read,
    write,
)

ROOT = Path(__file__).parents[4]
A, B, C, D, E = (key_of(number) for number in range(5))


def test_nobody_waits_for_a_lock_that_is_never_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.workers.tiers.shared_count.LOCK_WAIT_S", 0.01)
    tier, stopped = disk_tier(tmp_path / "kv"), DiskStore(str(tmp_path / "kv"))
    write(tier, [A])
    with stopped._count.locked():
        assert write(tier, [A, B]) == ([A], [])
        assert read(tier, [A]) == [True]
        assert disk_tier(tmp_path / "kv").known() == [A]
    assert tier.counts()["busy"] == 1
    assert write(tier, [B]) == ([B], [])


def test_where_the_count_was_deleted_all_count_in_one_new_file(tmp_path: Path) -> None:
    """As somebody deletes all that is in a store, with its users running."""
    place = tmp_path / "kv"
    first = disk_tier(place, blocks_max=2)
    write(first, [A, B])
    for file in (place / LOCK_FILE, *files_in(place)):
        file.unlink()
    second = disk_tier(place, blocks_max=2)
    write(second, [C, D])
    write(first, [A, B])
    assert len(files_in(place)) == 2
    (place / LOCK_FILE).unlink()
    write(first, [E])
    assert len(files_in(place)) <= 2
    assert (place / LOCK_FILE).exists()


def test_a_lock_that_is_kept_is_waited_for_once_in_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.workers.tiers.shared_count.LOCK_WAIT_S", 0.01)
    tier, stopped = disk_tier(tmp_path / "kv"), DiskStore(str(tmp_path / "kv"))
    begin = tier._store.begin
    with contextlib.ExitStack() as kept:

        def begin_and_lose_the_lock(*bounds: Any) -> Any:
            begun = begin(*bounds)
            kept.enter_context(stopped._count.locked())
            return begun

        monkeypatch.setattr(tier._store, "begin", begin_and_lose_the_lock)
        assert write(tier, [A, B, C]) == ([], [])
        assert tier.counts()["busy"] == 1
    assert files_in(tmp_path / "kv") == []


def test_a_lock_that_is_kept_refuses_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.workers.tiers.shared_count.LOCK_WAIT_S", 0.01)
    disk_tier(tmp_path / "kv")
    with DiskStore(str(tmp_path / "kv"))._count.locked():
        tier = disk_tier(tmp_path / "kv", contract=FOREIGN)
    assert write(tier, [A]) == ([A], [])
    assert DiskStore(str(tmp_path / "kv")).contract(FOREIGN.name) == FOREIGN.as_json()


def test_no_file_gets_its_name_or_goes_while_somebody_counts_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.workers.tiers.shared_count.LOCK_WAIT_S", 0.01)
    tier, counting = disk_tier(tmp_path / "kv"), DiskStore(str(tmp_path / "kv"))
    store = DiskStore(str(tmp_path / "kv"))
    begun = store.begin(CONTRACT.name, 2, FILE_BYTES, 9 * FILE_BYTES, 9)
    assert begun is not None
    [one, other], _ = begun
    parts = (b"\0" * FILE_BYTES,)
    with counting._count.locked():
        with pytest.raises(BlockingIOError):
            store.put(one, block_name(A), parts)
        assert Path(one).exists()
        assert not path_of(tmp_path / "kv", A).exists()
        store.discard([other], FILE_BYTES)
    assert store.num_files() == 2, "a file that went unseen is counted until the next look"
    store.put(one, block_name(A), parts)
    assert store.shrink(9 * FILE_BYTES, 9) == []
    assert store.num_files() == 1
    assert tier.known() == [A]


def test_threads_that_read_write_and_evict_never_see_a_wrong_byte(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path / "kv", blocks_max=4, clock_ns=time.time_ns)
    keys = [key_of(number) for number in range(8)]

    def work(offset: int) -> None:
        for i in range(60):
            one, two = keys[(i + offset) % 8], keys[(i * 3 + offset) % 8]
            write(tier, [one, two])
            read(tier, [two, one, keys[(i * 5) % 8]])

    on_threads(work)
    assert set(tier.counts()) <= {"gone", "evicted", "busy"}
    assert 0 < len(files_in(tmp_path / "kv")) <= 4


WRITER = """
import sys
from pathlib import Path
from tests.unit.workers.tiers.stored_blocks import disk_tier, key_of, read, write
import time
place, first, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tier = disk_tier(place, blocks_max=16, clock_ns=time.time_ns)
print("ready", flush=True)
sys.stdin.readline()
for i in range(rounds):
    keys = [key_of((first + i + j) % 48) for j in range(4)]
    write(tier, keys)
    intact = read(tier, keys)
    print(sum(intact), flush=True)
print(sorted(tier.counts()))
"""


def _start(place: Path, first: int, rounds: int) -> "subprocess.Popen[str]":
    started = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(place), str(first), str(rounds)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    return started


def test_two_processes_share_a_directory(tmp_path: Path) -> None:
    """Each evicts what the other wrote; nothing but absence comes of it, and the bound holds."""
    both = [_start(tmp_path / "kv", first, 150) for first in (0, 24)]
    for one in both:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    outputs = [one.communicate(timeout=120)[0].split("\n") for one in both]
    for one, lines in zip(both, outputs, strict=True):
        assert one.returncode == 0
        assert lines[-2] in ("['evicted']", "['evicted', 'gone']", "['busy', 'evicted', 'gone']")
        assert sum(int(line) for line in lines[:-2]) > 300  # of 600: most are still there
    assert 0 < len(files_in(tmp_path / "kv")) <= 16
    assert all(path.stat().st_size == FILE_BYTES for path in files_in(tmp_path / "kv"))


def test_a_writer_killed_in_the_middle_leaves_a_sound_store(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    disk_tier(kv)
    for rounds in range(3, 12, 4):
        writer = _start(kv, rounds * 5, 1_000_000)
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
        for _ in range(rounds):
            writer.stdout.readline()
        writer.kill()
        writer.communicate(timeout=60)
        tier = disk_tier(kv, blocks_max=16, clock_ns=Clock(2_000_000_000 * 10**9))
        known = list(tier.known())
        assert len(known) >= 4
        assert all(read(tier, known))
        assert len(files_in(kv)) <= 16


def test_what_a_killed_writer_left_counts_and_is_removed_when_it_is_old(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    clock = Clock()
    tier = disk_tier(kv, blocks_max=2, clock_ns=clock)
    left = kv / CONTRACT.name / f"{PARTIAL_PREFIX}0011223344556677"
    left.write_bytes(b"x" * (BLOCK_BYTES // 2))
    os.utime(left, ns=(clock.now_ns, clock.now_ns))
    write(tier, [A, B])
    tier = disk_tier(kv, blocks_max=2, clock_ns=clock)
    assert left.exists()
    assert tier.known() == [B]  # there was room for one beside it
    clock.now_ns += PARTIAL_OLD_NS + 1
    disk_tier(kv, blocks_max=2, clock_ns=clock)
    assert not left.exists()


def test_a_clock_set_back_does_not_keep_new_blocks_out(tmp_path: Path) -> None:
    """What was used in the future goes first; a clock that is a little ahead changes nothing."""
    kv, clock = tmp_path / "kv", Clock()
    ahead = Clock(clock.now_ns + CLOCKS_APART_NS // 2)
    tier, other = (disk_tier(kv, blocks_max=3, clock_ns=one) for one in (clock, ahead))
    write(tier, [A])
    write(other, [B])
    write(tier, [C])
    assert write(tier, [D]) == ([D], [A])
    left = kv / CONTRACT.name / f"{PARTIAL_PREFIX}0011223344556677"
    left.touch()
    os.utime(left, ns=(clock.now_ns, clock.now_ns))
    clock.now_ns -= 4 * CLOCKS_APART_NS
    tier = disk_tier(kv, blocks_max=3, clock_ns=clock)
    assert not left.exists()  # nobody fills it any more
    assert write(tier, [A]) == ([A], [C])
    assert write(tier, [E]) == ([E], [D])
    assert write(tier, [C]) == ([C], [B])
    assert write(tier, [B]) == ([B], [A])  # from here on in the order of use
    assert read(tier, [E, C, B]) == [True] * 3
