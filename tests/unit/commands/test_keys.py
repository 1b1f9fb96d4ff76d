"""`disagg keys`: what it writes a router reads, and a key is shown once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner

from disagg.cluster import hash_key
from disagg.cluster.hash_key import make_hash_key, own_path, with_hash_key
from disagg.commands.keys import app
from disagg.config import Settings
from disagg.errors import ConfigError
from disagg.router.callers import Caller
from disagg.router.keys import KeyRing, hash_of

CODE = "import sys; from disagg.commands.keys import app; app(sys.argv[1:])"
CREATE = [sys.executable, "-c", CODE, "create"]


def run(*arguments: str) -> str:
    """What it prints; the command's own error where it ends with one."""
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def create(path: Path, name: str, tenant: str, *more: str) -> str:
    return run("create", "--file", str(path), "--name", name, "--tenant", tenant, *more).strip()


def test_what_is_created_opens_a_router_until_it_is_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    laptop = create(path, "laptop", "alice")
    grafana = create(path, "grafana", "ops", "--scope", "observe", "--scope", "admin")
    text = path.read_text()
    assert laptop not in text
    assert hash_of(laptop) in text
    assert path.stat().st_mode & 0o777 == 0o600
    ring = KeyRing(is_open=False)
    ring.replace(path.read_bytes())
    assert ring.find(laptop) == Caller("alice", "laptop", frozenset({"serve"}))
    assert ring.find(grafana) == Caller("ops", "grafana", frozenset({"observe", "admin"}))
    shown = run("list", "--file", str(path))
    assert [word in shown for word in ("laptop", "alice", "admin, observe")] == [True] * 3
    listed = json.loads(run("list", "--file", str(path), "--json"))["keys"]
    assert [key["name"] for key in listed] == ["laptop", "grafana"]
    for secret in (laptop, hash_of(laptop), hash_of(grafana)):
        assert secret not in shown + json.dumps(listed)
    path.chmod(0o640)
    run("revoke", "--file", str(path), "laptop")
    assert path.stat().st_mode & 0o777 == 0o640  # its reader is not locked out
    ring.replace(path.read_bytes())
    assert ring.find(laptop) is None
    assert ring.find(grafana)
    assert [one.name for one in tmp_path.iterdir()] == ["keys.json"]


def test_a_key_revoked_by_a_link_opens_the_routers_file_no_more(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("keys.json")
    laptop = create(tmp_path / "link", "laptop", "alice")
    ring = KeyRing(is_open=False)
    ring.replace((tmp_path / "keys.json").read_bytes())
    assert ring.find(laptop)
    run("revoke", "--file", str(tmp_path / "link"), "laptop")
    ring.replace((tmp_path / "keys.json").read_bytes())
    assert ring.find(laptop) is None


def test_a_file_in_no_ones_home_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="no home directory is known"):
        run("list", "--file", "~no-such-user/keys.json")


def test_what_no_router_would_take_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create(path, "laptop", "alice")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="same name"):
        create(path, "laptop", "bob")
    with pytest.raises(ConfigError, match="tenant"):
        create(path, "other", "a/b")
    with pytest.raises(ConfigError, match="'root' is none of"):
        create(path, "other", "alice", "--scope", "root")
    with pytest.raises(ConfigError, match="no key 'nobody'"):
        run("revoke", "--file", str(path), "nobody")
    with pytest.raises(ConfigError, match="No such file"):
        run("list", "--file", str(tmp_path / "none"))
    assert path.read_bytes() == before


def test_a_key_that_cannot_be_shown_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    create(path, "seen", "acme")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*CREATE, "--file", str(path), "--name", "unseen", "--tenant", "acme"],
            stdout=full,
            stderr=subprocess.DEVNULL,
        )
    assert ended.returncode == 1
    listed = json.loads(run("list", "--json", "--file", str(path)))
    assert [key["name"] for key in listed["keys"]] == ["seen"]


def test_of_keys_made_at_once_none_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    command = [*CREATE, "--file", str(path)]
    started = [
        subprocess.Popen(
            [*command, "--name", f"k{n}", "--tenant", "t"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for n in range(3)
    ]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    assert len(json.loads(path.read_text())["keys"]) == 3


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "hash-key"
    run("create-hash-key", str(path))
    assert len(path.read_text().strip()) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="File exists"):
        run("create-hash-key", str(path))


def test_a_full_disk_leaves_no_empty_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hash-key"

    def full(file: int, mode: str) -> IO[str]:
        os.close(file)
        return open("/dev/full", mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdopen", full)
        with pytest.raises(ConfigError, match="No space left"):
            make_hash_key(path)
    assert not path.exists()
    make_hash_key(path)


def test_of_two_first_starts_the_second_takes_the_secret_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(path: Path) -> None:
        make_hash_key(path)  # the other one, meanwhile
        make_hash_key(path)

    monkeypatch.setattr(hash_key, "make_hash_key", make)
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    made = with_hash_key(Settings(), environ, lasting=True).cluster.hash_key_file
    assert made == str(own_path(environ))


def test_who_has_no_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    with pytest.raises(ConfigError, match=r"^cluster\.hash_key_file: .*XDG_STATE_HOME"):
        with_hash_key(Settings(), {}, lasting=True)


def test_a_cluster_of_one_machine_makes_its_own_secret(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    made = [with_hash_key(Settings(), environ).cluster for _ in range(2)]
    assert made[0].hash_key != made[1].hash_key
    assert not own_path(environ).exists()
    with_host = Settings.model_validate({"worker": {"tiers": ["host?size=1MiB"]}})
    assert with_hash_key(with_host, environ).cluster.hash_key
    # What is on a disk is found again by the next run.
    lasting = Settings.model_validate({"worker": {"tiers": [f"disk:{tmp_path}/kv?size=1MiB"]}})
    paths = [with_hash_key(lasting, environ).cluster.hash_key_file for _ in range(2)]
    assert paths == [str(own_path(environ))] * 2
    assert own_path(environ).stat().st_mode & 0o777 == 0o600
    given = Settings.model_validate({"cluster": {"hash_key": "k"}})
    assert with_hash_key(given, environ) is given
