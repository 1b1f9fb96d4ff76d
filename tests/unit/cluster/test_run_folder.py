"""Clean-up removes the folder it made and nothing else, whatever went wrong before."""

import ast
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from disagg.cluster import local, run_folder
from disagg.cluster.local import LocalCluster
from disagg.cluster.processes import find_children
from disagg.cluster.run_folder import LEFT_S, PARENT, PREFIX, RunFolder
from disagg.commands.signals import hurry_on_signals, interrupt_on_signals
from disagg.config import Settings
from disagg.errors import ConfigError
from disagg.workers.left_folders import remove_left

ROOT = Path(__file__).parents[3]


@pytest.fixture
def precious(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with something in it."""
    (tmp_path / "work.txt").write_text("do not lose me")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "work.txt"


def test_a_run_folder_comes_and_goes(precious: Path) -> None:
    folder = RunFolder()
    assert folder.path.parent == PARENT
    assert folder.path.stat().st_mode & 0o077 == 0
    (folder.path / "log").write_text("x")
    folder.remove()
    assert not folder.path.exists()
    assert precious.exists()


def test_a_file_that_finds_no_room_is_named() -> None:
    folder = RunFolder()
    made, folder.path = folder.path, Path("/dev")
    with pytest.raises(ConfigError, match=r"^/dev/full: No space left on device$"):
        folder.write("full", "x" * 10_000)
    folder.path = made
    assert folder.write("settings.yaml", "x").read_text() == "x"
    folder.remove()


@pytest.mark.parametrize("wrong", [".", "", "/tmp", "relative", "other"])
def test_another_folder_is_never_removed(precious: Path, wrong: str) -> None:
    folder = RunFolder()
    made = folder.path
    other = RunFolder()
    folder.path = other.path if wrong == "other" else Path(wrong)
    with pytest.raises((RuntimeError, FileNotFoundError)):
        folder.remove()
    assert precious.exists()
    assert other.path.exists()
    other.remove()
    folder.path = made
    folder.remove()


def test_a_link_in_its_place_is_not_followed(precious: Path) -> None:
    folder = RunFolder()
    folder.path.rmdir()
    folder.path.symlink_to(precious.parent)
    with pytest.raises(RuntimeError, match="nothing is removed"):
        folder.remove()
    assert precious.exists()
    folder.path.unlink()


def test_a_cluster_that_never_started_removes_nothing(
    precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of calls of `disagg serve` without a model: start raises, stop follows."""
    parent = tmp_path / "runs"  # other clusters of this machine come and go in the usual one
    parent.mkdir()
    monkeypatch.setattr(run_folder, "PARENT", parent)
    cluster = LocalCluster(Settings())
    with pytest.raises(ConfigError, match=r"model\.dir"):
        cluster.start()
    cluster.stop()
    LocalCluster(Settings()).stop()
    assert precious.read_text() == "do not lose me"
    assert os.listdir(parent) == []


@pytest.mark.parametrize("handled", [True, False])
def test_a_second_ctrl_c_while_a_start_is_undone_cuts_nothing_short(
    handled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came between the end of all processes and the removal of the folder, with its keys."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def removed(path: Path) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run_folder, "PARENT", tmp_path)
    monkeypatch.setattr(local, "router_options", lambda _: None)
    monkeypatch.setattr(local, "check_files", lambda _: None)
    monkeypatch.setattr(local, "with_certificates", interrupted)
    monkeypatch.setattr(local, "remove_keys", removed)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        interrupt_on_signals()
        cluster = LocalCluster(
            Settings(),
            before_stop=(lambda one: hurry_on_signals(one.hurry)) if handled else lambda _: None,
        )
        with pytest.raises(KeyboardInterrupt):
            cluster.start()
        assert bool(os.listdir(tmp_path)) is not handled  # the control: nobody will remove it
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_no_router_is_asked_for_its_load_once_it_is_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the automatic mode the last line of every run said that it did not answer."""
    monkeypatch.setattr(run_folder, "PARENT", tmp_path)
    cluster, calls = LocalCluster(Settings()), []
    cluster._folder, cluster._before = RunFolder(), find_children(os.getpid())
    cluster._router = Mock(stop=lambda _: calls.append("router"))
    close, stop = (lambda: calls.append("close"), lambda: calls.append("workers"))
    cluster._supervisor = Mock(close=close, stop=stop)
    cluster.stop()
    assert calls == ["close", "router", "workers"]
    assert os.listdir(tmp_path) == []


def test_where_ray_cannot_be_stopped_its_processes_are_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's shutdown raised after its installation was replaced; two agents and a key stayed."""

    def refuses() -> None:
        raise ImportError("no such module")

    said: list[str] = []
    monkeypatch.setattr(run_folder, "PARENT", tmp_path)
    monkeypatch.setattr(local, "stop_ray", refuses)
    cluster = LocalCluster(Settings(), said.append)
    cluster._folder, cluster._before = RunFolder(), find_children(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as agent:
        cluster._interrupted = True
        cluster.stop()
        assert agent.wait(10) < 0
    assert cluster.faults == said == ["Ray: no such module"]
    assert os.listdir(tmp_path) == []


def test_nothing_else_removes_folders() -> None:
    removing = {"rmtree", "removedirs"}
    places = [
        path.relative_to(ROOT).as_posix()
        for folder in ("disagg", "workers", "router", "tests", "demo", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_relative_to(ROOT / "disagg/workers")
        and not path.is_relative_to(ROOT / "disagg/router")
        if any(
            isinstance(node, ast.Attribute | ast.alias)
            and (node.attr if isinstance(node, ast.Attribute) else node.name) in removing
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert places == ["disagg/cluster/run_folder.py", "workers/left_folders.py"]


def test_a_run_folder_is_locked_while_its_run_lasts() -> None:
    """So systemd-tmpfiles leaves it alone, which takes this lock of what it is to remove."""
    folder = RunFolder()
    found = os.open(folder.path, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.remove()
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(found)


@pytest.mark.parametrize(
    ("case", "goes"),
    [
        ("old", True),
        ("locked", False),
        ("young", False),
        ("young log", False),
        ("open to others", False),
        ("another's", False),
        ("another name", False),
        ("a link", False),
        ("a file", False),
    ],
)
def test_what_killed_runs_have_left_goes_after_a_day(
    case: str, goes: bool, precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "runs"
    parent.mkdir()
    left = parent / ("x-disagg-run-x" if case == "another name" else "disagg-run-x")
    if case == "a link":
        left.symlink_to(tmp_path)
    elif case == "a file":
        left.write_text("x")
    else:
        left.mkdir(mode=0o755 if case == "open to others" else 0o700)
        (left / "router.log").write_text("x")
        (left / "work").symlink_to(tmp_path)
    now_s = left.lstat().st_mtime + (0 if case == "young" else LEFT_S + 60)
    if case == "young log":
        os.utime(left / "router.log", (now_s, now_s))
    if case == "another's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    held = os.open(left, os.O_RDONLY)
    try:
        if case == "locked":
            fcntl.flock(held, fcntl.LOCK_SH)
        remove_left(parent, PREFIX, now_s, LEFT_S)
    finally:
        os.close(held)
    assert os.path.lexists(left) is not goes
    assert precious.read_text() == "do not lose me"


def test_a_start_removes_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "PARENT", tmp_path)
    (tmp_path / "disagg-run-x").mkdir(mode=0o700)
    os.utime(tmp_path / "disagg-run-x", (0, 0))
    folder = RunFolder()
    assert os.listdir(tmp_path) == [folder.path.name]
    folder.remove()


def test_no_room_for_a_run_folder_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "PARENT", Path("/proc/none"))
    with pytest.raises(ConfigError, match=r"^/proc/none: No such file or directory$"):
        RunFolder()
