"""Where vLLM's queues have their sockets while the ranks of this host start."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from disagg.workers.engines.vllm.executors import SOCKETS, nameless_sockets
from disagg.workers.options import WorkerOptions


def options(**given: object) -> WorkerOptions:
    plain = {"worker_id": "w", "role": "both", "model_dir": "", "model_name": ""}
    return WorkerOptions(**(plain | {"router_addresses": ()} | given))  # type: ignore[arg-type]


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
