"""The object store tier, over obstore's stores in memory and in a directory."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from disagg.workers.tiers.contract import TierContract
from disagg.workers.tiers.object_store import ObjectStore
from disagg.workers.tiers.object_tier import ObjectTier
from disagg.workers.tiers.options import TierOptions
from disagg.workers.tiers.stored_block import block_name
from tests.unit.workers.tiers.stored_blocks import (
    CONTRACT,
    FILE_BYTES,
    FOREIGN,
    key_of,
    path_of,
    read,
    write,
)

A, B, C, D, E = (key_of(number) for number in range(5))


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    url = {"memory": "memory:///", "file": f"file://{tmp_path}/objects"}[request.param]
    return ObjectStore(url)


def object_tier(
    store: ObjectStore, blocks_max: int = 100, contract: TierContract = CONTRACT
) -> ObjectTier:
    options = TierOptions("object", "object", store.place, blocks_max * FILE_BYTES)
    return ObjectTier(options, contract, store=store)


def test_a_block_comes_back_as_it_was_written(store: ObjectStore) -> None:
    tier = object_tier(store)
    assert write(tier, [A, B, (7, A[1])]) == ([A, B, (7, A[1])], [])
    assert read(tier, [B, A, C, (7, A[1])]) == [True, True, False, True]
    assert tier.counts()["gone"] == 1


def test_a_restart_finds_its_store(store: ObjectStore) -> None:
    write(object_tier(store), [A, B])
    again = object_tier(store)
    assert set(again.known()) == {A, B}
    assert read(again, [A, B]) == [True, True]
    assert object_tier(store, contract=FOREIGN).known() == []


def test_a_full_tier_gives_up_what_was_used_least_recently(store: ObjectStore) -> None:
    tier = object_tier(store, blocks_max=3)
    write(tier, [A, B, C])
    read(tier, [A])
    assert write(tier, [D]) == ([D], [B])
    assert read(tier, [B, D]) == [False, True]
    assert len(list(store.blocks())) == 3


def test_what_others_wrote_is_within_the_same_bound(store: ObjectStore) -> None:
    one, other = object_tier(store, blocks_max=4), object_tier(store, blocks_max=4)
    write(one, [A, B])
    write(other, [C, D])
    write(one, [E])
    write(other, [A])
    assert len(list(store.blocks())) <= 4
    assert read(one, [E]) == [True]


def test_what_another_worker_evicted_is_a_miss(store: ObjectStore) -> None:
    one, other = object_tier(store), object_tier(store)
    write(one, [A])
    other.forget([A])
    assert read(one, [A]) == [False]
    assert A not in one.known()
    assert write(one, [A]) == ([A], [])
    assert read(other, [A]) == [True]


def test_what_a_write_gives_up_of_itself_is_not_stored(store: ObjectStore) -> None:
    tier = object_tier(store, blocks_max=2)
    assert write(tier, [A, B, C]) == ([B, C], [A])
    assert read(tier, [A, B, C]) == [False, True, True]


def test_an_object_that_is_gone_keeps_no_other_from_being_deleted(store: ObjectStore) -> None:
    keys = [key_of(number) for number in range(30)]
    write(object_tier(store), keys)
    store.delete(CONTRACT.name, [block_name(keys[0])])
    store.delete(CONTRACT.name, [block_name(key) for key in keys])
    assert list(store.blocks()) == []


@pytest.mark.parametrize("damage", ["truncated", "longer", "corrupt", "foreign", "another"])
def test_damage_is_a_miss_and_is_removed(store: ObjectStore, damage: str) -> None:
    tier = object_tier(store)
    write(tier, [A, B])
    write(object_tier(store, contract=FOREIGN), [A])
    whole = bytes(store.get(CONTRACT.name, block_name(A)) or b"")
    data, why = {
        "truncated": (whole[:-1], "truncated"),
        "longer": (whole + b"x", "truncated"),
        "corrupt": (whole[:-1] + bytes([whole[-1] ^ 1]), "corrupt"),
        "foreign": (bytes(store.get(FOREIGN.name, block_name(A)) or b""), "foreign"),
        "another": (bytes(store.get(CONTRACT.name, block_name(B)) or b""), "foreign"),
    }[damage]
    store.put(CONTRACT.name, block_name(A), data)
    assert read(tier, [A, B]) == [False, True]
    assert tier.counts()[why] == 1
    assert store.get(CONTRACT.name, block_name(A)) is None
    write(tier, [A])
    assert read(tier, [A]) == [True]


def test_an_object_that_no_memory_can_take_is_a_miss(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}")
    tier = object_tier(store)
    write(tier, [A, B])
    os.truncate(tmp_path / CONTRACT.name / block_name(A), 1 << 42)  # has no blocks on the disk
    (listed,) = [block for block in store.blocks() if block.key == A]
    assert store.load(listed) == b""
    assert read(tier, [A, B]) == [False, True]
    assert tier.counts()["truncated"] == 1
    assert store.get(CONTRACT.name, block_name(A)) is None


class Empty(BaseHTTPRequestHandler):
    """A bucket without objects."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")

    def log_message(self, *_: object) -> None:
        pass


def test_a_store_without_tls_is_used_where_the_environment_allows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            endpoint = f"http://127.0.0.1:{server.server_port}"
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
                monkeypatch.setenv(name, "none")
            monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
            assert list(ObjectStore("s3://bucket/prefix").blocks()) == []
            monkeypatch.delenv("AWS_ALLOW_HTTP")
            with pytest.raises(ConfigError):
                list(ObjectStore("s3://bucket/prefix").blocks())
        finally:
            server.shutdown()
            serving.join()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, store: ObjectStore) -> list[str]:
    """Names of calls that fail, to be added to."""
    from obstore.exceptions import GenericError

    failing: list[str] = []

    class Obstore:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if name in failing:
                    raise GenericError(f"{name} timed out")
                return getattr(real, name)(*args, **kwargs)

            return call

    real = store._obstore
    monkeypatch.setattr(store, "_obstore", Obstore())
    return failing


def test_a_store_that_fails_misses_and_comes_back(store: ObjectStore, broken: list[str]) -> None:
    tier = object_tier(store)
    write(tier, [A])
    broken += ["get", "put", "delete", "list"]
    assert read(tier, [A]) == [False]
    assert write(tier, [B, C]) == ([], [])
    tier.forget([A])
    assert tier.counts() == {"evicted": 0, "unreadable": 1, "failed": 2}
    broken.clear()
    assert write(tier, [B]) == ([B], [])
    assert read(tier, [B]) == [True]


def test_a_store_that_fails_is_waited_for_once_in_a_read(
    store: ObjectStore, broken: list[str]
) -> None:
    tier = object_tier(store)
    write(tier, [A, B])
    broken.append("get")
    assert read(tier, [A, B]) == [False, False]
    assert tier.counts()["unreadable"] == 1
    broken.clear()
    assert read(tier, [A, B]) == [True, True]


def test_what_cannot_be_deleted_takes_room(store: ObjectStore, broken: list[str]) -> None:
    tier = object_tier(store, blocks_max=2)
    write(tier, [A, B])
    broken.append("delete")
    for _ in range(3):
        assert write(tier, [C]) == ([], [])
    assert {block.key for block in store.blocks()} == {A, B}
    broken.clear()
    assert write(tier, [C]) == ([C], [A])


def test_a_store_that_cannot_be_listed_is_refused_at_the_start(
    store: ObjectStore, broken: list[str]
) -> None:
    broken.append("list")
    with pytest.raises(ConfigError, match="list timed out"):
        object_tier(store)


@pytest.mark.parametrize(("repeats", "said"), [(True, "begins anew"), (False, "more than 16,777,")])
def test_a_listing_without_end_is_given_up(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, repeats: bool, said: str
) -> None:
    """It was followed until the memory was full."""

    def pages(*_: object, **__: object) -> Iterator[list[dict[str, str]]]:
        for number in count():
            yield [{"path": f"other/{0 if repeats else number}"}]

    class Obstore:
        list = staticmethod(pages)

    monkeypatch.setattr(store, "_obstore", Obstore())
    with pytest.raises(ConfigError, match=said):
        list(store.blocks())


@pytest.mark.parametrize("place", ["", "bucket", "nothing://known"])
def test_what_is_no_url_of_a_store_is_refused(place: str) -> None:
    with pytest.raises(ConfigError):
        ObjectTier(TierOptions("object", "object", place, 1 << 20), CONTRACT)


def test_objects_and_files_have_the_same_names(tmp_path: Path) -> None:
    write(object_tier(ObjectStore(f"file://{tmp_path}/objects")), [A])
    assert path_of(tmp_path / "objects", A).stat().st_size == FILE_BYTES


def test_emptied_it_has_nothing_of_its_contract_whoever_wrote_it(store: ObjectStore) -> None:
    ours, neighbour, other = (
        object_tier(store),
        object_tier(store),
        object_tier(store, contract=FOREIGN),
    )
    write(ours, [A])
    write(neighbour, [B])
    write(other, [A])
    ours.clear()
    assert read(neighbour, [A, B]) == [False] * 2
    assert read(other, [A]) == [True]
    assert object_tier(store).known() == []
    assert write(ours, [A]) == ([A], [])
