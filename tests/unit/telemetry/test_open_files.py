"""How many files a process allows itself."""

import resource
import subprocess
import sys

import pytest

from disagg.errors import ConfigError, RemoteFault
from disagg.telemetry.open_files import FILES_MAX, UNLIMITED, files_left, files_within, tight_limits
from disagg.workers import nixl_transport
from disagg.workers.pool_region import PoolRegion

PROGRAM = """
import resource
from disagg.telemetry.open_files import allow_files
print({call}, *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
WORKER = """
import os, resource
from disagg.workers.actor import WorkerActor
from disagg.workers.options import WorkerOptions

class Fresh:
    role, routers_of_cluster = "both", None
    def __init__(self, options): print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
    def start(self): pass
    def wait_failed(self, timeout_s=None): return False

WorkerActor(WorkerOptions("w", "both", "", "m", ()), "__main__:Fresh")
os._exit(0)
"""
LIMITED = ("sh", "-c", 'ulimit -Sn 100; ulimit -Hn 200; exec "$@"', "sh", sys.executable, "-c")


@pytest.mark.parametrize(
    ("limits", "num_files"),
    [
        ((1024, 4096), 4096),
        ((4096, 4096), 4096),
        ((1024, 1 << 30), FILES_MAX),
        ((1024, UNLIMITED), FILES_MAX),
        ((1 << 20, 1 << 20), 1 << 20),  # nothing is given up
        ((UNLIMITED, UNLIMITED), FILES_MAX),
    ],
)
def test_as_many_as_the_system_allows(limits: tuple[int, int], num_files: int) -> None:
    assert files_within(*limits) == num_files


@pytest.mark.parametrize(
    ("limit", "num_taken", "num_left"),
    [(1024, 512, 256), (20_000, 4096, 7952), (1024, 4096, 256), (UNLIMITED, 0, FILES_MAX // 2)],
)
def test_a_port_takes_a_part_of_them(
    monkeypatch: pytest.MonkeyPatch, limit: int, num_taken: int, num_left: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert files_left(num_taken) == num_left


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("allow_files()", "200 200 200"),
        ("None", "None 100 200"),  # control: who does not ask has what it began with
    ],
)
def test_a_process_asks_for_them(call: str, said: str) -> None:
    command = [*LIMITED, PROGRAM.format(call=call)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said


def test_a_worker_has_them_before_it_connects_to_anybody() -> None:
    done = subprocess.run([*LIMITED, WORKER], capture_output=True, text=True)
    assert done.stdout.strip() == "200 200", done.stderr


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((64, 64), r"NIXL_ERR_BACKEND.*; this process may have only 64 files open \(ulimit -Hn\)"),
        ((64, 4096), r"NIXL_ERR_BACKEND'\)$"),
    ],
)
def test_a_transport_that_does_not_start_says_where_files_are_few(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], said: str
) -> None:
    def start(*_: object) -> None:
        raise RemoteFault("starting NIXL: nixlBackendError: NIXL_ERR_BACKEND")  # and no word more

    monkeypatch.setattr(nixl_transport, "NixlAgent", start)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    pool = PoolRegion(0, 1, 4096, "DRAM", 0, None)
    with pytest.raises(ConfigError, match=said):
        nixl_transport.NixlTransport(
            "w:1", pool, on_read_done=lambda *_: None, handle_bytes_max=1 << 20
        )


def test_limits_that_end_others_without_a_word_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: 60, resource.RLIMIT_FSIZE: 102_400, resource.RLIMIT_AS: 3}
    monkeypatch.setattr(resource, "getrlimit", lambda of: (limits[of], limits[of]))
    said = tight_limits()
    for part in ("only 60 files open", "102,400 bytes (ulimit -f)", "3 bytes (ulimit -v)"):
        assert part in said
    limits.update(dict.fromkeys(limits, UNLIMITED))
    assert tight_limits() == ""
