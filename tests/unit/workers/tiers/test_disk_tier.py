"""The disk tier while all is well: bounds, order of use, restarts, sharing."""

import json
import stat
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from disagg.workers.tiers.disk_store import DiskStore
from disagg.workers.tiers.disk_tier import DiskTier
from disagg.workers.tiers.options import EvictionPolicy, TierOptions
from tests.unit.workers.tiers.stored_blocks import (
    CONTRACT,
    FILE_BYTES,
    FOREIGN,
    Clock,
    content_of,
    disk_tier,
    files_in,
    key_of,
    path_of,
    read,
    write,
)

A, B, C, D, E = (key_of(number) for number in range(5))


def test_a_block_comes_back_as_it_was_written(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path / "kv")
    other_group = (7, A[1])
    assert write(tier, [A, B, other_group]) == ([A, B, other_group], [])
    assert read(tier, [B, A, C, other_group]) == [True, True, False, True]
    assert tier.counts()["gone"] == 1


def test_a_restart_finds_its_store_in_the_order_of_use(tmp_path: Path) -> None:
    clock = Clock()
    tier = disk_tier(tmp_path / "kv", clock_ns=clock)
    write(tier, [A, B, C])
    read(tier, [A])
    tier.close()
    again = disk_tier(tmp_path / "kv", clock_ns=clock)
    assert again.known() == [B, C, A]
    assert read(again, [A, B, C]) == [True] * 3


def test_writing_again_keeps_what_is_there_and_counts_as_use(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path / "kv")
    write(tier, [A, B])
    inode = path_of(tmp_path / "kv", A).stat().st_ino
    assert write(tier, [A]) == ([A], [])
    assert path_of(tmp_path / "kv", A).stat().st_ino == inode
    assert tier.known() == [B, A]


@pytest.mark.parametrize(("eviction", "first_out"), [("lru", B), ("fifo", A)])
def test_a_full_tier_gives_up_what_goes_first(
    tmp_path: Path, eviction: EvictionPolicy, first_out: tuple[int, bytes]
) -> None:
    tier = disk_tier(tmp_path / "kv", blocks_max=3, eviction=eviction)
    write(tier, [A, B, C])
    read(tier, [A])
    write(tier, [A])
    assert write(tier, [D]) == ([D], [first_out])
    assert read(tier, [first_out, D]) == [False, True]
    assert len(files_in(tmp_path / "kv")) == 3


def test_files_are_bounded_like_bytes(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path / "kv", blocks_max=100, files="2")
    write(tier, [A, B])
    assert write(tier, [C])[1] == [A]
    assert len(files_in(tmp_path / "kv")) == 2
    assert write(tier, [A, D, E]) == ([A, D], [B, C])


def test_more_than_the_tier_holds_is_stored_in_part(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path / "kv", blocks_max=3)
    stored, _ = write(tier, [A, B, C, D, E])
    assert stored == [A, B, C]
    assert len(files_in(tmp_path / "kv")) == 3


def test_a_large_full_store_gives_up_a_share_at_once(tmp_path: Path) -> None:
    """Each giving up looks at every file: once for many blocks, not once a block."""
    tier = disk_tier(tmp_path / "kv", blocks_max=64)
    write(tier, [key_of(number) for number in range(64)])
    _, evicted = write(tier, [key_of(64)])
    assert evicted == [key_of(number) for number in range(5)]
    assert len(files_in(tmp_path / "kv")) == 64 - 5 + 1


def test_other_models_age_out_of_the_same_bound(tmp_path: Path) -> None:
    clock = Clock()
    old = disk_tier(tmp_path / "kv", blocks_max=3, contract=FOREIGN, clock_ns=clock)
    write(old, [A, B])
    new = disk_tier(tmp_path / "kv", blocks_max=3, clock_ns=clock)
    assert new.known() == []
    assert read(new, [A]) == [False]
    assert write(new, [A, B]) == ([A, B], [])  # what went is not this contract's
    assert len(files_in(tmp_path / "kv")) == 3
    assert old.known() == [B]


def test_two_tiers_share_a_directory(tmp_path: Path) -> None:
    clock = Clock()
    one = disk_tier(tmp_path / "kv", blocks_max=4, clock_ns=clock)
    other = disk_tier(tmp_path / "kv", blocks_max=4, clock_ns=clock)
    write(one, [A, B])
    assert read(other, [A, B]) == [True, True]
    write(other, [C, D])
    _, evicted = write(one, [E])
    assert evicted == [A]
    assert read(other, [A, B]) == [False, True]
    assert len(files_in(tmp_path / "kv")) == 4


def test_a_smaller_setting_holds_from_the_start(tmp_path: Path) -> None:
    clock = Clock()
    write(disk_tier(tmp_path / "kv", blocks_max=9, clock_ns=clock), [A, B, C, D])
    assert disk_tier(tmp_path / "kv", blocks_max=2, clock_ns=clock).known() == [C, D]


def test_forgotten_blocks_leave_room(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path / "kv", blocks_max=2)
    write(tier, [A, B])
    tier.forget([A, C])
    assert write(tier, [D]) == ([D], [])
    assert read(tier, [A, B, D]) == [False, True, True]


def test_files_are_for_their_user_alone(tmp_path: Path) -> None:
    write(disk_tier(tmp_path / "new" / "kv"), [A])
    for path in (tmp_path / "new" / "kv").rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert stat.S_IMODE((tmp_path / "new" / "kv").stat().st_mode) == 0o700


def test_the_store_says_whose_blocks_it_has(tmp_path: Path) -> None:
    disk_tier(tmp_path / "kv")
    text = (tmp_path / "kv" / CONTRACT.name / "contract.json").read_text()
    assert json.loads(text)["contract"]["model_fingerprint"] == "f" * 64
    assert DiskStore(str(tmp_path / "kv"), create=False).contract(CONTRACT.name) == text


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    with pytest.raises(ConfigError, match="others may write"):
        disk_tier(tmp_path / "kv")


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        disk_tier(tmp_path / "kv")


@pytest.mark.parametrize(
    ("others", "message"),
    [({"files": "-1"}, "files=-1"), ({"files": "0"}, "files=0"), ({"blocks": "4"}, "blocks")],
)
def test_unknown_options_are_refused_by_name(
    tmp_path: Path, others: dict[str, str], message: str
) -> None:
    options = TierOptions("disk", "disk", str(tmp_path / "kv"), 1 << 20, others=others)
    with pytest.raises(ConfigError, match=message):
        DiskTier(options, CONTRACT)


def test_a_store_with_no_room_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"one block of {FILE_BYTES} bytes"):
        disk_tier(tmp_path / "kv", blocks_max=0)


def test_the_comparison_in_these_tests_sees_a_wrong_byte(tmp_path: Path) -> None:
    """Negative control: a tier that does not look at checksums."""

    class Careless(DiskTier):
        def _get(self, key: tuple[int, bytes], view: memoryview, header: bytearray) -> bool:
            view[:] = path_of(tmp_path / "kv", key).read_bytes()[-len(view) :]
            return True

    tier = disk_tier(tmp_path / "kv")
    write(tier, [A])
    path = path_of(tmp_path / "kv", A)
    path.write_bytes(path.read_bytes()[:-1] + bytes([content_of(A)[-1] ^ 1]))
    tier.__class__ = Careless
    with pytest.raises(AssertionError, match="wrong bytes"):
        read(tier, [A])


def test_emptied_it_has_nothing_of_its_contract_and_all_of_others(tmp_path: Path) -> None:
    place = tmp_path / "kv"
    ours, neighbour, other = disk_tier(place), disk_tier(place), disk_tier(place, contract=FOREIGN)
    write(ours, [A, B])
    write(neighbour, [C])
    write(other, [A])
    ours.clear()
    assert read(neighbour, [A, B, C]) == [False] * 3
    assert read(other, [A]) == [True]
    assert write(ours, [A]) == ([A], [])
    assert disk_tier(place).known() == [A]


def test_what_cannot_be_emptied_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk_tier(tmp_path / "kv")
    write(tier, [A])

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("disagg.workers.tiers.disk_store.os.unlink", refuse)
    with pytest.raises(ConfigError, match="Permission denied"):
        tier.clear()
