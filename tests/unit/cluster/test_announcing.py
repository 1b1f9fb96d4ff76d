"""The process that announces a router in the Ray cluster, started as the router starts it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from disagg.cluster import announcing
from disagg.cluster.announcing import Announcement
from disagg.cluster.ray_watch import NO_CLUSTER_EXIT_CODE
from disagg.config import Settings

BOUND_S = 120.0
SECRET = "ab" * 32
NOBODY = "127.0.0.1:1"
ON_ALL_ADDRESSES = {
    "router": {"host": "0.0.0.0", "grpc_port": 8_007, "allow_unauthenticated": True},
    "cluster": {"allow_insecure": True},
}

SIGTERM_IN_THE_IMPORT_OF_RAY = """
import os, signal, sys, types

class Imported(types.ModuleType):
    def __getattr__(self, name):
        os.kill(os.getpid(), signal.SIGTERM)

sys.modules["disagg.cluster.ray_cluster"] = Imported("ray_cluster")
from disagg.cluster.announcing import main
sys.exit(main(int(sys.argv[1]), sys.argv[2]))
"""


def command(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> list[str]:
    """Of the process that a router with these settings starts."""
    commands: list[list[str]] = []

    class Kept:
        def __init__(self, name: str, command: list[str], report: object) -> None:
            commands.append(command)

        def poll(self) -> None:
            """Nothing is started."""

        def stop(self, timeout_s: float) -> None:
            """Nothing runs."""

    monkeypatch.setattr(announcing, "Kept", Kept)
    cluster = {"ray_address": NOBODY, "join_timeout_s": 1, "hash_key": SECRET}
    both = {"cluster": cluster | given.pop("cluster", {})} | given
    Announcement(Settings.model_validate(both)).withdraw()
    return commands[0]


def ended(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)


@pytest.mark.parametrize(
    "given",
    [
        {"cluster": {"heartbeat_ms": 10_000}, "router": {"worker_silent_ms": 30_000}},
        {"router": {"grpc_port": 8_001, "admin_port": 9_001}},
        {"router": {"grpc_port": 8_000, "http_port": 9_000}},
    ],
)
def test_it_takes_settings_that_are_sound_together_alone(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    """It gets a part of them, and ends for another reason: there is no cluster."""
    process = ended(command(monkeypatch, given))
    assert process.returncode == NO_CLUSTER_EXIT_CODE, process.stderr


def test_it_is_told_no_secret_where_everybody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = command(monkeypatch, ON_ALL_ADDRESSES)[-1]
    assert SECRET not in given
    told = json.loads(given)
    assert (told["address"], told["on_all_addresses"]) == ("127.0.0.1:8007", True)


def test_a_signal_while_ray_is_imported_ends_it_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, given = command(monkeypatch, {})
    process = ended([sys.executable, "-c", SIGTERM_IN_THE_IMPORT_OF_RAY, str(os.getpid()), given])
    assert (process.returncode, process.stderr) == (0, "")
