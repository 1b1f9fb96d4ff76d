"""A disk tier whose directory is damaged, hostile, full or gone: misses, never a wrong byte."""

import errno
import os
import resource
import shutil
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.workers.tiers.disk_store import LOCK_FILE, DiskStore
from disagg.workers.tiers.stored_block import CONTRACT_FILE, HEADER_BYTES
from tests.unit.workers.tiers.stored_blocks import (
    CONTRACT,
    FILE_BYTES,
    FOREIGN,
    Clock,
    disk_tier,
    files_in,
    key_of,
    path_of,
    read,
    write,
)

ROOT = Path(__file__).parents[4]
A, B, C, D, E = (key_of(number) for number in range(5))


@pytest.mark.parametrize("num_bytes", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, FILE_BYTES - 1])
def test_a_truncated_file_is_a_miss_and_is_removed(tmp_path: Path, num_bytes: int) -> None:
    tier = disk_tier(tmp_path / "kv")
    write(tier, [A])
    os.truncate(path_of(tmp_path / "kv", A), num_bytes)
    assert read(tier, [A]) == [False]
    assert tier.counts()["truncated"] == 1
    assert not path_of(tmp_path / "kv", A).exists()
    assert write(tier, [A]) == ([A], [])
    assert read(tier, [A]) == [True]


def test_a_truncated_file_is_written_anew(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path / "kv")
    write(tier, [A])
    os.truncate(path_of(tmp_path / "kv", A), 100)
    write(tier, [A])
    assert read(tier, [A]) == [True]


def test_any_flipped_bit_is_a_miss(tmp_path: Path) -> None:
    """Each byte of the header, and some of the block."""
    tier = disk_tier(tmp_path / "kv")
    path = path_of(tmp_path / "kv", A)
    write(tier, [A])
    whole = path.read_bytes()
    for at in (*range(HEADER_BYTES), *range(HEADER_BYTES, FILE_BYTES, 37), FILE_BYTES - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        assert read(tier, [A]) == [False], at
        assert not path.exists()
    assert set(tier.counts()) <= {"corrupt", "foreign", "truncated", "evicted"}
    path.write_bytes(whole)
    assert read(tier, [A]) == [True]  # control: the bytes between the flips are what is read


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (lambda kv: path_of(kv, B), lambda kv: path_of(kv, A)),
        (lambda kv: path_of(kv, (1, A[1])), lambda kv: path_of(kv, A)),
        (lambda kv: path_of(kv, A, FOREIGN), lambda kv: path_of(kv, A)),
    ],
    ids=["another block", "another group", "another model"],
)
def test_an_intact_file_under_a_wrong_name_is_a_miss(
    tmp_path: Path, source: Callable[[Path], Path], target: Callable[[Path], Path]
) -> None:
    kv = tmp_path / "kv"
    tier = disk_tier(kv)
    write(tier, [A, B, (1, A[1])])
    write(disk_tier(kv, contract=FOREIGN), [A])
    shutil.copy(source(kv), target(kv))
    assert read(tier, [A]) == [False]
    assert tier.counts()["foreign"] == 1


def test_another_version_of_the_format_is_foreign(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path / "kv")
    write(tier, [A])
    with path_of(tmp_path / "kv", A).open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 2))
    assert read(tier, [A]) == [False]
    assert tier.counts()["foreign"] == 1


def _directory(path: Path) -> None:
    path.mkdir()


def _link(path: Path) -> None:
    target = path.parents[2] / "elsewhere"
    write(disk_tier(target), [A])
    path.symlink_to(path_of(target, A))


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("plant", [_directory, _link, _pipe, _device])
def test_what_is_no_plain_file_is_a_miss(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    """A pipe without a writer must not make the reader wait; a link leads out of the store."""
    tier = disk_tier(tmp_path / "kv")
    plant(path_of(tmp_path / "kv", A))
    assert read(tier, [A]) == [False]
    write(tier, [A, B])
    assert read(tier, [B]) == [True]


def test_names_in_a_store_lead_nowhere(tmp_path: Path) -> None:
    """Names are parsed, never joined: only what has the form of a block is listed or removed."""
    kv = tmp_path / "kv"
    tier = disk_tier(kv, blocks_max=2)
    (tmp_path / "precious").write_bytes(b"mine")
    folder = kv / CONTRACT.name
    strange = [
        "..-2e2e", "0-..%2f", "0-", "-00", "00-aa", "0-AA", "0-0", "0-" + "a" * 130, "1e1-aa",
        "\u0661-aa", "0-aa\n", "aa", "contract.json.bak",
    ]  # fmt: skip
    for name in strange:
        (folder / name).write_bytes(b"x" * 4 * FILE_BYTES)
        os.utime(folder / name, (0, 0))
    (kv / "0123").mkdir()
    (kv / "0123" / "0-aa").write_bytes(b"x")
    (kv / ("0" * 32)).symlink_to(tmp_path)
    (tmp_path / "0-aa").write_bytes(b"not of this store")
    assert tier.known() == []
    write(tier, [A, B, C])
    DiskStore(str(kv), create=False).shrink(0, 0)
    assert tier.known() == []
    assert sorted(os.listdir(folder)) == sorted([*strange, "contract.json"])
    assert (tmp_path / "0-aa").exists()
    assert (kv / "0123" / "0-aa").exists()


@pytest.mark.parametrize("count", [b"", b"garbage", b"\xff" * 16, b"\0" * 16])
def test_the_count_in_the_lock_file_is_only_believed_within_bounds(
    tmp_path: Path, count: bytes
) -> None:
    """Too many counted makes it look; too few was there before this tier looked, at its start."""
    kv = tmp_path / "kv"
    write(disk_tier(kv, blocks_max=3), [A, B])
    (kv / LOCK_FILE).write_bytes(count)
    tier = disk_tier(kv, blocks_max=3)
    write(tier, [C])
    write(tier, [D])
    assert len(files_in(kv)) == 3


def _fail(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int, fails: Callable[[], bool]
) -> None:
    real = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if fails():
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)


def test_a_full_device_stores_less_and_gives_up_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = disk_tier(tmp_path / "kv")
    write(tier, [A, B, C])
    full = [False, True, True, True]
    _fail(monkeypatch, "writev", errno.ENOSPC, lambda: full.pop(0) if full else False)
    assert write(tier, [D, E, key_of(5)]) == ([D], [A, B])
    assert tier.counts()["full"] == 1
    assert len(files_in(tmp_path / "kv")) == 2  # C and D, and nothing half written
    full.clear()
    assert write(tier, [E]) == ([E], [])
    assert read(tier, [A, C, D, E]) == [False, True, True, True]


def test_a_real_limit_of_the_system_is_a_block_not_stored(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path / "kv")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES - 1, hard))  # Python ignores SIGXFSZ
    try:
        assert write(tier, [A]) == ([], [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tier.counts()["failed"] == 1
    assert files_in(tmp_path / "kv") == []
    assert write(tier, [A]) == ([A], [])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_failing_device_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier = disk_tier(tmp_path / "kv")
    write(tier, [A])
    with monkeypatch.context() as patched:
        _fail(patched, "open", number, lambda: True)
        assert read(tier, [A]) == [False]
        assert write(tier, [B]) == ([], [])
    assert tier.counts()["unreadable"] == 1
    assert tier.counts()["failed"] == 1
    assert read(tier, [A]) == [True]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(0o000)
    with pytest.raises(ConfigError, match="Permission denied"):
        disk_tier(tmp_path / "kv")


def test_a_directory_that_is_removed_misses_and_comes_back(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    tier = disk_tier(kv)
    write(tier, [A])
    (kv / CONTRACT.name).rename(tmp_path / "gone")
    assert read(tier, [A]) == [False]
    assert write(tier, [A]) == ([A], [])
    kv.rename(tmp_path / "gone-too")
    assert read(tier, [A]) == [False]
    tier.clear()  # what is not there is empty: no reset fails by it
    assert write(tier, [A]) == ([A], [])
    assert read(tier, [A]) == [True]
    assert stat.S_IMODE(kv.stat().st_mode) == 0o700
    (kv / CONTRACT.name / CONTRACT_FILE).unlink()
    kv.rename(tmp_path / "gone-again")
    (tmp_path / "kv").touch()  # something else has the name
    assert write(tier, [A]) == ([], [])
    assert tier.counts()["failed"] == 1


def test_after_a_move_all_workers_count_in_one_file(tmp_path: Path) -> None:
    """The lock went along: whoever keeps that one counts for himself what others count too."""
    kv = tmp_path / "kv"
    before = disk_tier(kv, blocks_max=2)
    write(before, [A])
    kv.rename(tmp_path / "moved")
    after = disk_tier(kv, blocks_max=2)
    write(after, [B])
    write(before, [C])
    assert DiskStore(str(kv)).num_files() == 2
    assert write(before, [D])[1] == [B]


def test_a_device_without_room_for_a_file_gives_up_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No inodes are left: not one file can be begun."""
    tier = disk_tier(tmp_path / "kv")
    write(tier, [A, B, C])
    full = [True]
    _fail(monkeypatch, "ftruncate", errno.ENOSPC, lambda: full.pop() if full else False)
    assert write(tier, [D, E]) == ([], [A, B])
    assert tier.counts()["full"] == 1
    assert write(tier, [D, E]) == ([D, E], [])
    assert read(tier, [A, B, C, D, E]) == [False, False, True, True, True]


def test_files_of_the_future_go_first(tmp_path: Path) -> None:
    """The clock was wrong once: by their times they would be the newest for years."""
    kv, clock = tmp_path / "kv", Clock()
    year_ns = 365 * 86_400 * 10**9
    write(disk_tier(kv, contract=FOREIGN, clock_ns=Clock(clock.now_ns + year_ns)), [A, B])
    tier = disk_tier(kv, blocks_max=2, clock_ns=clock)
    assert write(tier, [C]) == ([C], [])
    assert write(tier, [D]) == ([D], [])
    assert read(tier, [C, D]) == [True, True]


def test_a_reader_keeps_what_is_evicted_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = disk_tier(tmp_path / "kv", blocks_max=1)
    write(tier, [A])
    real = os.readv

    def readv(fd: int, buffers: Sequence[Any]) -> int:
        monkeypatch.setattr(os, "readv", real)
        assert write(tier, [B])[1] == [A]
        return real(fd, buffers)

    monkeypatch.setattr(os, "readv", readv)
    assert read(tier, [A]) == [True]
    assert read(tier, [A]) == [False]


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_write = os.readv, os.writev
    monkeypatch.setattr(os, "readv", lambda fd, parts: real_read(fd, [memoryview(parts[0])[:100]]))
    monkeypatch.setattr(os, "writev", lambda fd, parts: real_write(fd, [parts[0][:100]]))
    tier = disk_tier(tmp_path / "kv")
    write(tier, [A])
    assert path_of(tmp_path / "kv", A).stat().st_size == FILE_BYTES
    assert read(tier, [A]) == [True]
