"""`disagg cache`: what it shows and removes, and how it refuses."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from disagg.commands.cache import app
from disagg.commands.stored_kv import places_in, places_of
from disagg.config import Settings
from disagg.errors import ConfigError, DisaggError
from disagg.workers.tiers.contract import TierContract
from disagg.workers.tiers.disk_store import DiskStore
from disagg.workers.tiers.object_store import ObjectStore
from disagg.workers.tiers.object_tier import ObjectTier
from disagg.workers.tiers.options import TierOptions
from disagg.workers.tiers.stored_block import StoredBlock
from tests.unit.workers.tiers.stored_blocks import (
    CONTRACT,
    FILE_BYTES,
    FOREIGN,
    REGISTERED,
    Clock,
    disk_tier,
    files_in,
    key_of,
    path_of,
    write,
)

KEYS = [key_of(number) for number in range(6)]
STORED_NS = time.time_ns()
"""Around that time the blocks are used; of a time that is to come they would be the oldest."""


def cache(*arguments: str, **options: Any) -> tuple[int, str]:
    """Exit code and standard output of the command."""
    run = CliRunner().invoke(app, list(arguments), **options)
    if isinstance(run.exception, DisaggError):
        raise run.exception
    assert run.exception is None or isinstance(run.exception, SystemExit), run.exception
    return run.exit_code, run.stdout


@pytest.fixture(params=["disk", "object"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store with four blocks of one model and two of another."""
    clock = Clock(STORED_NS)
    folder = tmp_path / "kv"
    for contract, keys in ((CONTRACT, KEYS[:4]), (FOREIGN, KEYS[4:])):
        if request.param == "disk":
            write(disk_tier(folder, contract=contract, clock_ns=clock), keys)
        else:
            options = TierOptions("object", "object", f"file://{folder}", 1 << 20)
            write(ObjectTier(options, contract), keys)
            for key in keys:
                stamp = clock()
                os.utime(path_of(folder, key, contract), ns=(stamp, stamp))
    return str(folder) if request.param == "disk" else f"file://{folder}"


@pytest.fixture
def folder(tmp_path: Path, place: str) -> Path:
    return tmp_path / "kv"


def test_list_shows_each_model(place: str) -> None:
    code, text = cache("list", place, "--json")
    (store,) = json.loads(text)["stores"]
    assert (code, store["store"]) == (0, place)
    ours, theirs = store["contracts"]
    assert (ours["contract"], ours["num_blocks"]) == (CONTRACT.name, 4)
    assert (ours["num_bytes"], ours["blocks_of_group"]) == (4 * FILE_BYTES, {"0": 4})
    assert (ours["model_fingerprint"], ours["dtype"]) == ("f" * 64, "float32")
    assert ours["oldest_use"] < ours["newest_use"] < theirs["oldest_use"]
    code, text = cache("list", place)
    assert CONTRACT.name[:12] in text
    assert time.strftime("%Y-%m-%d", time.gmtime(STORED_NS / 1e9)) in text
    assert cache("list", place, "--contract", FOREIGN.name[:5])[1].count("float32") == 1


def test_verify_names_what_is_damaged(place: str, folder: Path) -> None:
    assert cache("verify", place)[0] == 0
    path = path_of(folder, KEYS[0])
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    os.truncate(path_of(folder, KEYS[1]), 7)
    path_of(folder, KEYS[2]).write_bytes(path_of(folder, KEYS[3]).read_bytes())
    code, text = cache("verify", place, "--json")
    (answer,) = json.loads(text)["stores"]
    damaged = {one["block"].split("/")[1]: one["why"] for one in answer["damaged"]}
    assert damaged == {
        path.name: "corrupt",
        path_of(folder, KEYS[1]).name: "truncated",
        path_of(folder, KEYS[2]).name: "foreign",
    }
    assert (code, answer["num_blocks"], answer["num_removed"]) == (1, 6, 0)
    code, text = cache("verify", place, "--remove")
    assert (code, "3 removed" in text, path.name in text) == (1, True, True)
    assert len(files_in(folder)) == 3
    assert cache("verify", place)[0] == 0


def test_a_file_that_is_no_block_by_its_size_is_not_read(place: str, folder: Path) -> None:
    """A sparse file of 1 TiB ended it with MemoryError."""
    os.truncate(path_of(folder, KEYS[0]), 1 << 40)
    code, text = cache("verify", place, "--json")
    (answer,) = json.loads(text)["stores"]
    assert [one["why"] for one in answer["damaged"]] == ["too large"]
    assert (code, answer["num_blocks"]) == (1, 6)


def test_what_cannot_be_read_is_named_and_kept(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DiskStore.load

    def load(self: Any, block: StoredBlock) -> bytes:
        if block.key == KEYS[0]:
            raise ConfigError("Input/output error")
        return real(self, block)

    monkeypatch.setattr(DiskStore, "load", load)
    monkeypatch.setattr(
        ObjectStore, "load", lambda self, block: load(DiskStore(str(folder)), block)
    )
    code, text = cache("verify", place, "--remove", "--json")
    (answer,) = json.loads(text)["stores"]
    assert [one["why"] for one in answer["damaged"]] == ["unreadable"]
    assert (code, answer["num_removed"]) == (1, 0)
    assert len(files_in(folder)) == 6


def test_evict_keeps_what_was_used_last(place: str, folder: Path) -> None:
    size = f"{3 * FILE_BYTES + 1}"
    assert "3 blocks would be removed" in cache("evict", place, "--to", size, "--dry-run")[1]
    assert len(files_in(folder)) == 6
    assert "3 blocks removed" in cache("evict", place, "--to", size)[1]
    left = {path.name for path in files_in(folder)}
    assert left == {path_of(folder, key).name for key in KEYS[3:]}


def test_evict_by_time(place: str, folder: Path) -> None:
    os.utime(path_of(folder, KEYS[2]), (0, 0))
    assert "1 blocks removed" in cache("evict", place, "--unused-for", "7d")[1]
    assert not path_of(folder, KEYS[2]).exists()


def test_clear_asks_first_and_keeps_what_is_no_block(place: str, folder: Path) -> None:
    (folder / CONTRACT.name / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"6 blocks .* say --yes"):
        cache("clear", place)
    assert len(files_in(folder)) == 7
    code, text = cache("clear", place, "--contract", FOREIGN.name, "--yes", "--json")
    assert (code, json.loads(text)["stores"][0]["num_blocks"]) == (0, 2)
    cache("clear", place, "-y")
    assert [path.name for path in files_in(folder)] == ["notes.txt"]
    cache("clear", place)  # nothing to ask for


def test_a_worker_goes_on_and_misses(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path / "kv", blocks_max=4)
    write(tier, KEYS[:4])
    cache("clear", str(tmp_path / "kv"), "--yes")
    assert tier.known() == []
    assert write(tier, KEYS[:4]) == (KEYS[:4], [])  # and there is room for all


def test_stores_come_from_the_configuration(tmp_path: Path) -> None:
    write(disk_tier(tmp_path / "a"), KEYS[:1])
    write(disk_tier(tmp_path / "b"), KEYS[:2])
    config = tmp_path / "disagg.yaml"
    tiers = ["host?size=1GiB", *(f"disk:{tmp_path}/{n}?size=1GiB&name={n}" for n in "ab")]
    config.write_text(json.dumps({"worker": {"tiers": tiers}}))
    stores = json.loads(cache("list", "--config", str(config), "--json")[1])["stores"]
    assert [sum(c["num_blocks"] for c in store["contracts"]) for store in stores] == [1, 2]


def _nothing(place: Path) -> None:
    pass


def _a_file(place: Path) -> None:
    place.write_text("")


def _another_folder(place: Path) -> None:
    place.mkdir()


@pytest.mark.parametrize("make", [_nothing, _a_file, _another_folder])
def test_what_is_no_store_is_refused_and_left_alone(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "kv")
    before = sorted(tmp_path.rglob("*"))
    for command in ("list", "verify", "clear"):
        with pytest.raises(ConfigError):
            cache(command, str(tmp_path / "kv"))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list"], "which store"),
        (["evict", "/kv"], "--to SIZE, --unused-for TIME"),
        (["evict", "/kv", "--to", "all"], "not a size"),
        (["evict", "/kv", "--unused-for", "7 days"], "not a time such as 30m"),
        (["list", "nothing://at-all"], "nothing://at-all"),
    ],
)
def test_a_users_error_is_one_text(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cache(*arguments)


def test_a_contract_text_that_lies_is_shown_as_unknown(tmp_path: Path) -> None:
    """It comes from the store: it must neither break the table nor write to the terminal."""
    write(disk_tier(tmp_path / "kv"), KEYS[:1])
    file = tmp_path / "kv" / CONTRACT.name / "contract.json"
    lie = '{"contract": {"model_fingerprint": "\\u001b]0;x", "dtype": "float32"}}'
    for text in ("", "[1]", "\x1b[2J", '{"contract": 3}', lie):
        file.write_text(text)
        code, shown = cache("list", str(tmp_path / "kv"))
        assert (code, "\x1b" in shown) == (0, False)
        assert "?" in shown


def test_every_command_has_a_help() -> None:
    for command in ("list", "verify", "evict", "clear"):
        code, text = cache(command, "--help")
        assert (code, "--json" in text) == (0, True)


def test_an_object_store_without_its_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        cache("list", f"file://{tmp_path}/none")
    assert not (tmp_path / "none").exists()
    ObjectStore(f"file://{tmp_path}/none")
    assert (tmp_path / "none").exists()


def test_stores_of_ranks_are_found_in_their_directory(tmp_path: Path) -> None:
    for rank in range(2):
        contract = TierContract.of(replace(REGISTERED, num_ranks=2), rank)
        write(disk_tier(tmp_path / "kv", contract=contract), KEYS[: rank + 1])
    parts = [f"{tmp_path}/kv/rank-{rank}-of-2" for rank in range(2)]
    settings = Settings.model_validate(
        {"worker": {"tensor_parallel": 2, "tiers": [f"disk:{tmp_path}/kv?size=1MiB"]}}
    )
    assert places_of(settings) == places_in(f"{tmp_path}/kv") == parts
    code, said = cache("verify", f"{tmp_path}/kv", "--json")
    found = [(one["store"], one["num_blocks"]) for one in json.loads(said)["stores"]]
    assert (code, found) == (0, [(parts[0], 1), (parts[1], 2)])
    write(disk_tier(tmp_path / "kv"), KEYS)  # a worker of one rank, too
    assert places_in(f"{tmp_path}/kv") == [f"{tmp_path}/kv", *parts]


def test_a_store_is_found_by_its_tier_too(tmp_path: Path) -> None:
    place = str(tmp_path)
    assert places_in(f"disk:{place}?size=1GiB&write=reuse") == places_in(place)
    assert places_in("object:s3://kv/of-all?size=1GiB") == ["s3://kv/of-all"]
    with pytest.raises(ConfigError, match="size is missing"):
        places_in(f"disk:{place}")
