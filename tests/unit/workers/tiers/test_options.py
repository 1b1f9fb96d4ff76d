"""Tiers as settings name them, and how their kinds are found."""

from dataclasses import fields, replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.workers.tiers import kinds
from disagg.workers.tiers.contract import TierContract
from disagg.workers.tiers.kinds import open_tier, open_tiers
from disagg.workers.tiers.options import TierOptions, parse_tier, parse_tiers
from tests.unit.workers.tiers.pools import ScriptedTier
from tests.unit.workers.tiers.stored_blocks import CONTRACT, REGISTERED, key_of, read, write


def test_a_line_is_a_tier() -> None:
    assert parse_tier("host?size=2KiB") == TierOptions("host", "host", "", 2048)
    assert parse_tier(
        "disk:/var/kv?size=1MiB&name=nvme&write=reuse&eviction=fifo&threads=4&slow_ms=50&files=9"
    ) == TierOptions(
        "disk", "nvme", "/var/kv", 1 << 20, "reuse", "fifo", 4, 50, others={"files": "9"}
    )
    assert parse_tier("object:s3://bucket/a/b?size=1GB").place == "s3://bucket/a/b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected KIND"),
        ("/var/kv?size=1GiB", "expected KIND"),
        ("host", "size is missing"),
        ("host?size=", "size= is not a size"),
        ("host?size=-1", "size=-1 is not a size"),
        ("host?size=0", "size=0 is not a size"),
        ("host?1GiB", "NAME=VALUE"),
        ("host?size=1&size=2", "size is given twice"),
        ("host?size=1&write=always", "write=always is not publish or eviction or reuse"),
        ("host?size=1&eviction=random", "eviction=random is not lru or fifo"),
        ("host?size=1&threads=0", "threads=0 is not a number from 1 to 64"),
        ("host?size=1&slow_ms=1.5", "slow_ms=1.5 is not a number of milliseconds"),
        ("host?size=1&name=a/b", "name=a/b is not a name"),
    ],
)
def test_what_is_no_tier_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_tier(text)
    assert raised.value.param == "worker.tiers"


def test_tiers_have_different_names_and_are_few() -> None:
    with pytest.raises(ConfigError, match="two tiers are called 'host'"):
        parse_tiers(("host?size=1", "host?size=2"))
    assert [tier.name for tier in parse_tiers(("host?size=1", "host?size=2&name=b"))] == [
        "host",
        "b",
    ]
    with pytest.raises(ConfigError, match="at most 8"):
        parse_tiers(tuple(f"host?size=1&name=n{i}" for i in range(9)))


def test_all_of_ours_open_and_keep_blocks(tmp_path: Path) -> None:
    settings = [
        "host?size=64KiB",
        f"disk:{tmp_path}/kv?size=64KiB",
        f"object:file://{tmp_path}/objects?size=64KiB",
    ]
    opened = open_tiers(settings, REGISTERED)
    assert [options.name for options, _ in opened] == ["host", "disk", "object"]
    for _, tier in opened:
        write(tier, [key_of(1)])
        assert read(tier, [key_of(1), key_of(2)]) == [True, False]
        tier.close()


def test_an_unknown_kind_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"kind 'tape' \(known: disk, host, object"):
        open_tier(parse_tier("tape?size=1GiB"), CONTRACT)


def test_tiers_already_open_are_closed_when_a_later_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = ScriptedTier("scripted")
    _install(monkeypatch, "scripted", lambda options, contract: tier)
    with pytest.raises(ConfigError, match="kind 'tape'"):
        open_tiers(["scripted?size=1MiB", "tape?size=1MiB"], REGISTERED)
    assert tier.is_closed


def _install(monkeypatch: pytest.MonkeyPatch, kind: str, factory: Any) -> None:
    class Installed(EntryPoint):
        def load(self) -> Any:
            if isinstance(factory, Exception):
                raise factory
            return factory

    entry = Installed(kind, "their.module:Tier", kinds.ENTRY_POINTS)

    def entry_points(**selection: Any) -> EntryPoints:
        return EntryPoints([entry]).select(**selection)

    monkeypatch.setattr(kinds, "entry_points", entry_points)


def test_another_package_brings_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[TierOptions, TierContract]] = []

    def factory(options: TierOptions, contract: TierContract) -> ScriptedTier:
        options.refuse_others("colour")
        seen.append((options, contract))
        return ScriptedTier(options.name)

    _install(monkeypatch, "scripted", factory)
    opened = open_tier(parse_tier("scripted:there?size=2MiB&colour=blue"), CONTRACT)
    assert opened.name == "scripted"
    assert (seen[0][0].place, seen[0][1]) == ("there", CONTRACT)
    with pytest.raises(ConfigError, match="shape is no option of a scripted tier"):
        open_tier(parse_tier("scripted?size=2MiB&shape=round"), CONTRACT)
    assert "scripted" in kinds.kinds()


def test_a_kind_that_does_not_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "scripted", ImportError("no module"))
    with pytest.raises(ConfigError, match=r"do not load: their.module:Tier: ImportError"):
        open_tier(parse_tier("scripted?size=1MiB"), CONTRACT)


def test_a_tier_larger_than_its_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "scripted", lambda options, contract: ScriptedTier())
    with pytest.raises(ConfigError, match="1048576 bytes, not 'scripted' of at most 1024"):
        open_tier(parse_tier("scripted?size=1KiB"), CONTRACT)


def test_the_contract_is_all_that_gives_bytes_their_meaning() -> None:
    same = replace(REGISTERED, wire_min=0, wire_max=9, checksums="xxh3")
    assert TierContract.of(same).digest == CONTRACT.digest
    for field in fields(REGISTERED):
        if field.name.startswith("wire_") or field.name == "checksums":
            continue  # of transfers
        value: Any = getattr(REGISTERED, field.name)
        other: Any = (*value, "x") if isinstance(value, tuple) else value * 2 or 1
        changed = TierContract.of(replace(REGISTERED, **{field.name: other}))
        assert changed.digest != CONTRACT.digest, field.name
