"""A Ray of this machine that does not start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from disagg.cluster import ray_cluster
from disagg.cluster.ray_cluster import join_ray, start_ray
from disagg.config import Settings
from disagg.config.settings import ClusterSettings
from disagg.errors import ConfigError


def test_a_start_that_takes_too_long_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "tight_limits", lambda: "; ulimit -f")
    settings = Settings(cluster=ClusterSettings(start_timeout_s=1e-6))
    with pytest.raises(ConfigError, match=f"ulimit -f.*logs in {tmp_path}"):
        start_ray(settings, tmp_path)
    with pytest.raises(ConfigError, match=f"timed out during startup.*logs in {tmp_path}"):
        start_ray(settings, tmp_path)


@pytest.mark.parametrize("reason", ["timed out during startup", "no room"])
def test_a_start_that_ray_gives_up_is_tried_again_without_what_it_has_left(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[subprocess.Popen[bytes]] = []

    def init(**_: object) -> None:
        if not left:
            left.append(subprocess.Popen(["sleep", "600"]))
            raise Exception(f"The current node {reason}.")

    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setattr(ray, "init", init)
    other = subprocess.Popen(["sleep", "600"])  # as the router
    try:
        if reason == "no room":
            with pytest.raises(ConfigError, match="no room"):
                start_ray(Settings(), tmp_path)
            assert left[0].poll() is None  # ends with all others, by whoever started it
        else:
            start_ray(Settings(), tmp_path)
            assert left[0].wait(60) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (other, *left):
            process.kill()
            process.wait()


def test_a_working_directory_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray: `[Errno 2] No such file or directory`."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="working directory was removed"):
        start_ray(Settings(), tmp_path)
    with pytest.raises(ConfigError, match="working directory was removed"):
        join_ray("", 1.0)


@pytest.mark.parametrize("joins", [False, True])
def test_tls_without_certificates_is_refused_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """Ray's own processes end of it, and its library waits for them for half a minute."""

    def init(**_: object) -> None:
        raise ConfigError("begun")

    def begin() -> None:
        if joins:
            join_ray("127.0.0.1:1", 0.0)
        else:
            start_ray(Settings(), tmp_path)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "_check_token", lambda address: None)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    (tmp_path / "there").touch()
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(tmp_path / "there"))
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(tmp_path / "none"))
    monkeypatch.delenv("RAY_TLS_CA_CERT", raising=False)
    with pytest.raises(ConfigError, match="set RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT, or unset"):
        begin()
    for name in ("RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"):
        monkeypatch.setenv(name, str(tmp_path / "there"))
    with pytest.raises(ConfigError, match="begun"):
        begin()
    monkeypatch.setenv("RAY_USE_TLS", "0")
    monkeypatch.delenv("RAY_TLS_CA_CERT")
    with pytest.raises(ConfigError, match="begun"):
        begin()


def test_lines_of_workers_are_passed_on_as_they_were_written() -> None:
    """Whole, from each worker, without colours: a collector of logs reads them as JSON."""
    program = """if True:
        from disagg.cluster import ray_cluster
        ray_cluster._set_environment()
        from ray._private.worker import (
            _should_ignore_worker_log_prefix, global_worker, print_to_stdstream
        )
        bare = _should_ignore_worker_log_prefix(global_worker)
        for pid in (11, 22):
            data = {"pid": pid, "ip": "192.0.2.1", "actor_name": "WorkerActor", "is_err": False}
            print_to_stdstream(data | {"lines": ['{"message": "KV pool: 0.1 s"}']}, bare)
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == ['{"message": "KV pool: 0.1 s"}'] * 2
