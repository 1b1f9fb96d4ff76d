"""Files that commands write: whole, or as they were."""

import os
from pathlib import Path

import pytest

from disagg.commands.new_file import check_writable, write_whole
from disagg.errors import ConfigError


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_a_file_is_replaced_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b"before")
    check_writable(path, "--out")
    assert path.read_bytes() == b"before"
    write_whole(path, b"after", "--out")
    assert (path.read_bytes(), names(tmp_path)) == (b"after", ["c.json"])


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b"before")

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"^--out: .*c.json: No space left on device$"):
        write_whole(path, b"after", "--out")
    assert (path.read_bytes(), names(tmp_path)) == (b"before", ["c.json"])


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "inner" / "c.json")
    write_whole(link, b"one", "--out")
    write_whole(link, b"two", "--out")
    assert link.is_symlink()
    assert (tmp_path / "inner" / "c.json").read_bytes() == b"two"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe, "--out")
    write_whole(pipe, b"all", "--out")
    assert os.read(reader, 10) == b"all"
    assert pipe.is_fifo()
    os.close(reader)


@pytest.mark.parametrize(
    ("name", "said"), [("none/c.json", "is no directory"), ("", "is a directory")]
)
def test_where_no_file_can_be(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_writable(tmp_path / name, "--out")


def test_a_folder_that_takes_no_files() -> None:
    with pytest.raises(ConfigError, match=r"^--out: /proc/c.json: "):
        check_writable(Path("/proc/c.json"), "--out")


@pytest.mark.parametrize("name", ["a" * 300, "a" * 300 + "/c.json", "c" * 250])
def test_a_name_that_is_too_long(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--out: "):
        check_writable(tmp_path / name, "--out")
    with pytest.raises(ConfigError, match="File name too long"):
        write_whole(tmp_path / name, b"x", "--out")
    assert names(tmp_path) == []


def test_a_link_to_itself_is_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    check_writable(link, "--out")
    write_whole(link, b"x", "--out")
    assert link.read_bytes() == b"x"
