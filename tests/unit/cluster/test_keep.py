"""`disagg serve` goes on with other settings, or with the last ones where it cannot."""

import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.cluster.keep import Keeper
from disagg.cluster.kept import Kept
from disagg.cluster.router_group import RouterGroup
from disagg.config import Settings
from disagg.errors import ConfigError
from tests.process.harness import wait_until

DEAF = """#!/bin/sh
trap '' TERM
echo "$$ $*" >> {folder}/began
exec sleep 60
"""


class House:
    """A keeper whose router and supervisor are processes that no SIGTERM ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.keeper = Keeper(self.settings(), self.said.append)

    def settings(self, model: str = "model", **sections: object) -> Settings:
        directory = self.folder / model
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text("{}")
        cluster = {"stop_timeout_s": 0.2, "hash_key": "ab" * 32, "allow_insecure": True}
        router = {"http_port": 0, "grpc_port": 0, "admin_port": 0, "drain_timeout_ms": 100}
        given = {"model": {"dir": str(directory)}, "cluster": cluster, "router": router}
        return Settings.model_validate(given | sections)

    def began(self, command: str) -> list[list[str]]:
        file = self.folder / "began"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.split() for line in lines if f" {command} " in line]

    def wait_for(self, command: str, number: int) -> None:
        wait_until(lambda: len(self.began(command)) == number, f"{number} of {command}")

    @property
    def file(self) -> Path:
        words = self.began("workers")[0]
        return Path(words[words.index("--config") + 1])


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    deaf = tmp_path / "deaf"
    deaf.write_text(DEAF.format(folder=tmp_path))
    deaf.chmod(stat.S_IRWXU)
    monkeypatch.setattr(sys, "executable", str(deaf))
    house = House(tmp_path)
    try:
        house.keeper.start()
        house.wait_for("workers", 1)
        house.wait_for("router", 1)
        yield house
    finally:
        house.keeper.stop()


def test_a_supervisor_that_stands_still_holds_up_no_new_settings(house: House) -> None:
    house.keeper.reload(house.settings(scheduling={"max_sequences": 7}))
    house.wait_for("workers", 2)
    assert house.said == ["supervisor did not stop in 0.2 s and was killed"]
    assert "max_sequences: 7" in house.file.read_text()
    assert len(house.began("router")) == 1


def test_what_cannot_be_used_changes_nothing(house: House) -> None:
    before = house.file.read_text()
    autoscale = {"decode": "1-2", "api_key_file": str(house.folder / "none")}
    with pytest.raises(ConfigError, match="api_key_file"):  # the supervisor's alone
        house.keeper.reload(house.settings(autoscale=autoscale))
    house.file.with_suffix(".new").mkdir()  # as on a full disk
    with pytest.raises(ConfigError, match=r"settings\.yaml: "):
        house.keeper.reload(house.settings(scheduling={"max_sequences": 7}))
    assert house.file.read_text() == before
    house.file.with_suffix(".new").rmdir()
    house.keeper.poll()
    assert len(house.began("workers")) == 1


def test_the_last_checkpoint_may_have_gone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[Settings] = []
    monkeypatch.setattr(RouterGroup, "replace", lambda group, settings: replaced.append(settings))
    (house.folder / "model" / "config.json").unlink()
    house.keeper.reload(house.settings("other"))
    house.wait_for("workers", 2)
    assert [one.model.dir for one in replaced] == [str(house.folder / "other")]


def test_a_start_without_room_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    said: list[str] = []
    kept = Kept("supervisor", ["true"], said.append)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", fails)
        assert kept.poll() is None
        assert kept.child is None
    (line,) = said
    assert "supervisor cannot be started: " in line
    assert "again in 1 s" in line
    kept.stop(1.0)
    kept.poll()
    assert kept.child is not None
    kept.stop(10.0)
