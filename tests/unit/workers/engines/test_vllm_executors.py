"""Where vLLM's queues have their sockets while the ranks of this host start."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from disagg.workers.engines.vllm import executors
from disagg.workers.engines.vllm.executors import (
    SOCKETS,
    leaves_its_reason,
    nameless_sockets,
    reasons_of_ranks,
)
from disagg.workers.options import WorkerOptions


def options(**given: object) -> WorkerOptions:
    plain = {"worker_id": "w", "role": "both", "model_dir": "", "model_name": ""}
    return WorkerOptions(**(plain | {"router_addresses": ()} | given))  # type: ignore[arg-type]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For temporary files; pytest's names are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("fails", [False, True])
def test_the_folder_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    monkeypatch.delenv(SOCKETS, raising=False)
    with suppress(OSError), nameless_sockets(options(tensor_parallel=2)):
        folder = Path(os.environ[SOCKETS])
        (folder / "socket").touch()
        if fails:
            raise OSError("no rank starts")
    assert not folder.exists()
    assert SOCKETS not in os.environ


KILLED = """
import os, sys, tempfile
from disagg.workers.engines.vllm.executors import SOCKETS, nameless_sockets
from tests.unit.workers.engines.test_vllm_executors import options
tempfile.tempdir = sys.argv[1]
with nameless_sockets(options(tensor_parallel=2)):
    print(os.environ[SOCKETS], flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_start_has_left_goes_with_the_next(
    monkeypatch: pytest.MonkeyPatch, short_folder: Path
) -> None:
    monkeypatch.delenv(SOCKETS, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    monkeypatch.setattr(executors, "LEFT_S", -1.0)  # as if all were old
    command = [sys.executable, "-c", KILLED, str(short_folder)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as start:
        assert start.stdout is not None
        folder = Path(start.stdout.readline().strip())
        (folder / "socket").touch()
        with nameless_sockets(options(tensor_parallel=2)):
            assert (folder / "socket").exists()  # it goes on
            assert len(os.listdir(short_folder)) == 2
        start.kill()
    assert folder.exists()
    with nameless_sockets(options(tensor_parallel=2)):
        assert not folder.exists()
    assert os.listdir(short_folder) == []


def test_a_folder_that_is_only_just_made_stays(
    monkeypatch: pytest.MonkeyPatch, short_folder: Path
) -> None:
    """Its own start may not hold it yet."""
    monkeypatch.delenv(SOCKETS, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    made = short_folder / f"{executors.FOLDER}made"
    made.mkdir(mode=0o700)
    with nameless_sockets(options(tensor_parallel=2)):
        assert made.exists()
    os.utime(made, (0, 0))
    with nameless_sockets(options(tensor_parallel=2)):  # negative control
        assert not made.exists()


@pytest.mark.parametrize(
    "given", [{}, {"tensor_parallel": 2, "tensor_parallel_backend": "ray"}], ids=["one", "ray"]
)
def test_others_have_none(monkeypatch: pytest.MonkeyPatch, given: dict[str, object]) -> None:
    monkeypatch.delenv(SOCKETS, raising=False)
    with nameless_sockets(options(**given)):
        assert SOCKETS not in os.environ


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SOCKETS, str(tmp_path))
    with nameless_sockets(options(tensor_parallel=2)):
        assert os.environ[SOCKETS] == str(tmp_path)
    assert tmp_path.exists()


def test_where_names_would_be_too_long_sockets_stay_where_vllm_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SOCKETS, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * 60)
    with nameless_sockets(options(tensor_parallel=2)):
        assert SOCKETS not in os.environ


GENERIC = "WorkerProc initialization failed. See stack trace for root cause."


def rank_fails(said: str) -> None:
    with suppress(ValueError), leaves_its_reason():
        raise ValueError(said)


def start_fails(*said: str) -> None:
    """As vLLM's executor does: what ranks raise is in their logs alone."""
    with nameless_sockets(options(tensor_parallel=2)), reasons_of_ranks():
        for each in said:
            rank_fails(each)
        raise RuntimeError(GENERIC)


def test_the_first_rank_that_failed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKETS, raising=False)
    with pytest.raises(RuntimeError) as caught:
        start_fails("no such\ndevice", "lost the other one")
    assert str(caught.value) == "a rank failed: no such device"


def test_a_rank_that_was_killed_has_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKETS, raising=False)
    with pytest.raises(RuntimeError, match="perhaps killed"):
        start_fails()
    with pytest.raises(ValueError, match="said in this process"), reasons_of_ranks():
        raise ValueError("said in this process")  # control


def test_a_rank_of_rays_that_was_killed_is_told_in_one_sentence() -> None:
    with pytest.raises(RuntimeError, match="perhaps killed") as caught, reasons_of_ranks():
        raise ActorDiedError
    assert "\n" not in str(caught.value)
    with pytest.raises(RayTaskError), reasons_of_ranks():  # control: it has a reason of its own
        raise RayTaskError("init", "it", ValueError())  # type: ignore[no-untyped-call]


def test_nothing_is_left_in_a_folder_of_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would be taken for the reason of the next start."""
    monkeypatch.setenv(SOCKETS, str(tmp_path))
    with pytest.raises(RuntimeError, match="the log of this worker"):
        start_fails("no such device")
    assert list(tmp_path.iterdir()) == []
