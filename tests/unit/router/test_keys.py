"""API keys: what a file may hold, whose key is whose, and a file that changes."""

import asyncio
import hmac
import json
import logging
import os

import pytest

from disagg.errors import ConfigError
from disagg.router import keys_file
from disagg.router.callers import ANYBODY, SCOPES, Caller, UnauthenticatedError, presented_key
from disagg.router.keys import KEY, KeyRing, hash_of, new_key, parse_keys
from disagg.router.keys_file import KeysFile
from disagg.router.options import RouterOptions
from disagg.tls.given_file import FILE_BYTES_MAX
from tests.unit.router.scripted_worker import BOUND_S


def entry(name="laptop", tenant="alice", scopes=("serve",), key="", **more):
    return {
        "name": name,
        "tenant": tenant,
        "scopes": list(scopes),
        "sha256": hash_of(key or f"key of {name}"),
    } | more


def file_of(*entries) -> bytes:
    return json.dumps({"keys": entries}).encode()


def test_a_key_leads_to_its_caller_and_a_near_one_to_nobody():
    key, other = new_key(), new_key()
    ring = KeyRing(is_open=False)
    ring.replace(file_of(entry(key=key), entry("b", "bob", ("admin", "observe"), other)))
    assert ring.caller(key) == Caller("alice", "laptop", frozenset({"serve"}))
    assert ring.caller(other) == Caller("bob", "b", frozenset({"admin", "observe"}))
    for wrong in ("", key[:-1], key + "A", key.upper(), " " + key, hash_of(key), new_key()):
        with pytest.raises(UnauthenticatedError) as caught:
            ring.caller(wrong)
        assert not wrong or wrong not in str(caught.value)


def test_a_key_that_nobody_generated_opens_nothing():
    """A hash of a guessable text may stand in the file: such a text is not even compared."""
    weak = "disagg-password"
    ring = KeyRing(is_open=False)
    ring.replace(file_of(entry(key=weak)))
    assert ring.find(weak) is None
    assert KEY.fullmatch(new_key())
    assert len({new_key() for _ in range(100)}) == 100


def test_all_kept_hashes_are_compared_in_constant_time(monkeypatch):
    made = [new_key() for _ in range(5)]
    ring = KeyRing(is_open=False)
    ring.replace(file_of(*(entry(f"k{n}", key=key) for n, key in enumerate(made))))
    compared = []

    def compare_digest(kept, given):
        compared.append((kept, given))
        return real(kept, given)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    for key in (made[0], made[4], new_key()):
        compared.clear()
        ring.find(key)
        assert [kept.hex() for kept, _ in compared] == [hash_of(one) for one in made]
        assert {given.hex() for _, given in compared} == {hash_of(key)}


def test_without_keys_anybody_is_anybody_and_with_an_empty_list_nobody_is():
    assert KeyRing(is_open=True).caller("whatever") is ANYBODY
    assert ANYBODY.scopes == SCOPES
    ring = KeyRing(is_open=False)
    assert ring.replace(b'{"keys": []}') == 0
    assert ring.find(new_key()) is None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "EOF"),
        (b"[]", "should be an object"),
        (b"{}", "keys: Field required"),
        (b'{"keys": [], "more": 1}', "more: Extra"),
        (file_of(entry(name="a b")), "keys.0.name"),
        (file_of(entry(name="x" * 65)), "keys.0.name"),
        (file_of(entry(name="a\n")), "keys.0.name"),
        (file_of(entry(tenant="a/b")), "keys.0.tenant"),
        (file_of(entry(tenant="")), "keys.0.tenant"),
        (file_of(entry(scopes=())), "keys.0.scopes"),
        (file_of(entry(scopes=("root",))), "'root' is none of admin, observe, serve"),
        (file_of(entry(sha256="SECRET")), "keys.0.sha256"),
        (file_of(entry(key="SECRET", plain="SECRET")), "keys.0.plain"),
        (file_of(entry(), entry()), "laptop and laptop have the same name"),
        (file_of(entry("a", key="k"), entry("b", key="k")), "a and b have the same sha256"),
        (file_of(*(entry(f"k{n}", f"t{n}") for n in range(129))), "more than 128 tenants"),
        (file_of(*(entry(f"k{n}") for n in range(1025))), "keys: Tuple should have at most 1024"),
    ],
)
def test_a_file_that_is_none_is_refused_by_field_and_not_shown(data, said):
    with pytest.raises(ConfigError) as caught:
        parse_keys(data)
    error = caught.value
    assert said in error.message
    told = f"{error!r} {error.__cause__!r} {error.__context__ if error.__cause__ else ''}"
    assert "SECRET" not in told


def test_as_many_as_allowed_are_accepted():
    """The control of the bounds above."""
    assert len(parse_keys(file_of(*(entry(f"k{n}", f"t{n % 128}") for n in range(1024)))).keys)


def test_keys_are_in_no_repr():
    key = new_key()
    ring = KeyRing(is_open=False)
    ring.replace(file_of(entry(key=key)))
    options = RouterOptions("dir", "m", api_keys=file_of(entry(key=key)).decode())
    shown = repr((ring, parse_keys(file_of(entry(key=key))), options))
    assert hash_of(key) not in shown
    assert key not in shown


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, ""),
        ({b"authorization": b"Bearer abc"}, "abc"),
        ({b"authorization": b"bearer  abc "}, "abc"),
        ({b"x-api-key": b"abc"}, "abc"),
        ({b"authorization": b"Basic xyz", b"x-api-key": b"abc"}, "abc"),
        ({b"authorization": b"Bearer abc", b"x-api-key": b"def"}, "abc"),
        ({b"authorization": b"Basic xyz"}, ""),
        ({b"authorization": b"Bearer"}, ""),
        ({b"authorization": b"Bearer \xff"}, "\xff"),
    ],
)
def test_where_a_request_shows_its_key(headers, key):
    assert presented_key(headers) == key


# --- the file


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(keys_file, "LOOK_S", 0.001)


async def followed(path, changes):
    """Follow a file while ``changes`` goes on; an exception of either ends both."""
    kept = KeysFile(RouterOptions("dir", "m", api_keys_file=str(path)))
    async with asyncio.timeout(BOUND_S), asyncio.TaskGroup() as group:
        watch = group.create_task(kept.watch())
        await changes(kept.ring)
        watch.cancel()


def put(path, data):
    """Write a file that is being followed: one written in its place is empty for a moment."""
    new = path.with_name("new")
    new.write_bytes(data)
    new.replace(path)


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


@pytest.mark.usefixtures("quick")
async def test_a_new_file_replaces_the_keys_and_an_invalid_one_does_not(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    first, second = new_key(), new_key()
    path = tmp_path / "keys.json"
    path.write_bytes(file_of(entry(key=first)))

    async def changes(ring):
        assert ring.find(first)
        put(path, b'{"keys": [')  # half of one
        await until(lambda: "the former API keys stay in use" in caplog.text)
        assert ring.find(first)
        path.unlink()
        await until(lambda: "No such file" in caplog.text)
        assert ring.find(first)
        put(path, file_of(entry("b", key=second)))
        await until(lambda: ring.find(second))
        assert ring.find(first) is None

    await followed(path, changes)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 2, errors  # each state once, however often it was looked at
    assert first not in caplog.text
    assert hash_of(first) not in caplog.text


@pytest.mark.usefixtures("quick")
async def test_a_moment_without_a_free_thread_does_not_end_the_watch(tmp_path, caplog, monkeypatch):
    """A watch that ends takes the router along."""
    first, second = new_key(), new_key()
    path = tmp_path / "keys.json"
    path.write_bytes(file_of(entry(key=first)))
    given = asyncio.to_thread

    async def fails(*_):
        raise RuntimeError("can't start new thread")

    async def changes(ring):
        monkeypatch.setattr(asyncio, "to_thread", fails)
        await until(lambda: "can't start new thread" in caplog.text)
        assert ring.find(first)
        monkeypatch.setattr(asyncio, "to_thread", given)
        put(path, file_of(entry("b", key=second)))
        await until(lambda: ring.find(second))

    await followed(path, changes)


def test_of_a_file_with_many_faults_the_first_is_looked_for():
    """Half a million of them are a gigabyte, and seconds in which all streams stand still."""
    with pytest.raises(ConfigError) as caught:
        parse_keys(b'{"keys": [' + b",".join([b"0"] * 1000) + b"]}")
    assert caught.value.message.count("Input should be") == 1


@pytest.mark.usefixtures("quick")
async def test_a_mounted_secret_is_followed_through_its_links(tmp_path):
    """Kubernetes changes a link to a folder; size and name of the file stay."""
    made = [new_key(), new_key()]
    for n, key in enumerate(made):
        (tmp_path / f"v{n}").mkdir()
        (tmp_path / f"v{n}" / "keys.json").write_bytes(file_of(entry(key=key)))
    (tmp_path / "..data").symlink_to("v0")
    path = tmp_path / "keys.json"
    path.symlink_to("..data/keys.json")

    async def changes(ring):
        assert ring.find(made[0])
        (tmp_path / "..new").symlink_to("v1")
        os.replace(tmp_path / "..new", tmp_path / "..data")
        await until(lambda: ring.find(made[1]))
        assert ring.find(made[0]) is None

    await followed(path, changes)


@pytest.mark.usefixtures("quick")
async def test_a_pipe_in_place_of_the_file_holds_nobody_up(tmp_path, caplog):
    """Whoever opens one to read waits for a writer, and a thread that waits cannot be ended."""
    first, second = new_key(), new_key()
    path = tmp_path / "keys.json"
    path.write_bytes(file_of(entry(key=first)))

    async def changes(ring):
        path.unlink()
        os.mkfifo(path)
        try:
            await until(lambda: "is no file that can be read again" in caplog.text)
            assert ring.find(first)
        finally:  # lets a reader go that waits
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        path.unlink()
        put(path, file_of(entry("b", key=second)))
        await until(lambda: ring.find(second))

    await followed(path, changes)


@pytest.mark.parametrize("data", [None, b"", b"x" * (FILE_BYTES_MAX + 1)])
def test_a_router_does_not_start_with_a_file_it_cannot_use(tmp_path, data):
    path = tmp_path / "keys.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        KeysFile(RouterOptions("dir", "m", api_keys_file=str(path)))
    assert caught.value.param == "router.api_keys_file"
    assert str(path) in caught.value.message


def test_keys_from_a_variable(monkeypatch):
    key = new_key()
    kept = KeysFile(RouterOptions("dir", "m", api_keys=file_of(entry(key=key)).decode()))
    assert kept.ring.find(key)
    with pytest.raises(ConfigError) as caught:
        KeysFile(RouterOptions("dir", "m", api_keys="no json"))
    assert caught.value.param == "router.api_keys"
