"""What the requests of one tenant, or of one address, hold of all connections."""

import asyncio
import contextlib
import itertools
import json
import socket

import pytest

from disagg.router.callers import ANYBODY, NOBODY, Caller, network_of
from disagg.router.connection_shares import ConnectionShares, HeldConnectionsError
from disagg.router.http_cycle import Cycle
from disagg.router.keys import new_key
from tests.unit.router.test_connections import WHOLE, connect, one_answer, until_closed
from tests.unit.router.test_http_errors import COMPLETION
from tests.unit.router.test_keys import entry, file_of

KEYS = {name: new_key() for name in ("alice", "alice2", "bob")}
FILE = file_of(
    *(entry(name, name.rstrip("2"), ("serve",), key) for name, key in KEYS.items())
).decode()
BODY = json.dumps(COMPLETION).encode()
PATHS = (b"/v1/completions", b"/tokenize", b"/detokenize", b"/v1/chat/completions")
NUM = 8


def slow_head(number: int, key: str = "") -> bytes:
    """Of a request whose body does not come, to one of the pages that take one."""
    shown = f"authorization: Bearer {key}\r\n" if key else ""
    return b"POST %b HTTP/1.1\r\nhost: a\r\n%bcontent-type: application/json\r\n%b\r\n" % (
        PATHS[number % len(PATHS)],
        shown.encode(),
        b"content-length: %d\r\n" % len(BODY),
    )


def shares_of(house) -> ConnectionShares:
    return house.app._http_server.config.app._site._shares


async def fill(house, *keys: str, source: str = "127.0.0.1"):
    """As many requests as there may be connections, whose bodies do not come; what is refused."""
    held = []
    for number in range(NUM):
        reader, writer = await connect(house, source)
        writer.write(slow_head(number, keys[number % len(keys)] if keys else ""))
        held.append((reader, writer))
    refused = [asyncio.create_task(until_closed(reader)) for reader, _ in held]
    await asyncio.wait(refused, timeout=0.5)
    return held, [task.result() for task in refused if task.done()]


async def test_a_tenants_bodies_that_do_not_come_leave_connections_to_others(open_house):
    house = await open_house(api_keys=FILE, connections_max=NUM)
    await house.add()
    held, refused = await fill(house, KEYS["alice"], KEYS["alice2"])
    assert len(refused) == 1
    assert refused[0].startswith(b"HTTP/1.1 429 ")
    for said in (
        b"\r\nretry-after: 1\r\n",
        b"\r\nconnection: close\r\n",
        b"of this tenant",
        b"429",
    ):
        assert said in refused[0]
    reader, writer = await connect(house)
    writer.write(slow_head(0, KEYS["bob"]) + BODY)
    assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
    for _, other in (*held, (reader, writer)):
        other.close()
    state = house.app._http_server.server_state
    await house.until(lambda: not state.connections, "the connections closed")
    await house.until(lambda: not shares_of(house)._held, "what they held to be given back")


async def test_control_without_the_bound_one_tenant_has_them_all(open_house, monkeypatch):
    house = await open_house(api_keys=FILE, connections_max=NUM)
    monkeypatch.setattr(shares_of(house), "_connections_max", 10**9)
    held, refused = await fill(house, KEYS["alice"], KEYS["alice2"])
    assert refused == []
    reader, writer = await connect(house)
    assert (await until_closed(reader)).startswith(b"HTTP/1.1 503 ")
    for _, other in (*held, (reader, writer)):
        other.close()


async def test_without_keys_each_address_has_a_share_and_a_bound(open_house):
    house = await open_house(connections_max=NUM, streams_per_key_max=3)
    await house.add()
    held, refused = await fill(house, source="127.0.0.2")
    assert [b"of this address" in one for one in refused] == [True]
    caller = ANYBODY.at("127.0.0.2")
    streams = house.app._http_server.config.app._generation._streams
    assert streams.num_open(caller) == 3, "of four that would generate"
    answer = await house.http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 200
    for _, writer in held:
        writer.close()


async def test_who_expects_to_be_asked_for_a_body_is_not(open_house):
    house = await open_house(connections_max=NUM)
    held, _ = await fill(house)
    reader, writer = await connect(house)
    head = slow_head(0).replace(b"host", b"expect: 100-continue\r\nhost")
    writer.write(head)
    assert (await until_closed(reader)).startswith(b"HTTP/1.1 429 ")
    for _, other in held:
        other.close()
    await house.until(lambda: not shares_of(house)._held, "what they held to be given back")
    again, asked = await connect(house)
    asked.write(head)
    assert (await again.readline()).startswith(b"HTTP/1.1 100 "), "control"
    asked.close()
    writer.close()


def unread(house) -> socket.socket:
    """A client that asks for a large page and reads nothing of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", house.app.admin_port))
    client.sendall(WHOLE.replace(b"/health", b"/metrics"))
    return client


@pytest.mark.parametrize("is_counted", [True, False], ids=["counted", "control"])
async def test_who_does_not_take_answers_leaves_connections_to_others(
    open_house, monkeypatch, is_counted
):
    house = await open_house(connections_max=NUM, send_buffer_bytes=4096)
    if not is_counted:
        monkeypatch.setattr(Cycle, "taken", lambda cycle: asyncio.sleep(0))
    state = house.app._admin_server.server_state
    clients = []
    for num in range(1, NUM + 1):
        clients.append(unread(house))
        if is_counted and num == NUM:
            said = await asyncio.to_thread(clients[-1].recv, 4096)
            assert said.startswith(b"HTTP/1.1 429 ")
            num -= 1
        await house.until(
            lambda num=num: num_unread(state) == len(state.connections) == num,
            f"{num} unread answers",
        )
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", house.app.admin_port, local_addr=("127.0.0.2", 0)
    )
    writer.write(WHOLE)
    said = await reader.readline()
    assert said.startswith(b"HTTP/1.1 200 " if is_counted else b"HTTP/1.1 503 ")
    writer.close()
    for client in clients:
        client.close()


def num_unread(state) -> int:
    return sum(one.flow.write_paused for one in state.connections)


async def test_who_is_refused_and_takes_nothing_is_cut_off(open_house, monkeypatch):
    house = await open_house(connections_max=NUM, send_buffer_bytes=4096)
    state = house.app._admin_server.server_state
    client = unread(house)
    await house.until(lambda: num_unread(state), "an unread answer")
    monkeypatch.setattr(house.app._admin._site._shares, "_connections_max", 1)
    client.sendall(WHOLE)
    await house.until(lambda: not state.connections, "the connection cut")
    client.close()


def test_a_holder_leaves_a_sixteenth_and_one_alone_always_finds_a_place():
    shares = ConnectionShares(160)
    alice, same, bob = (Caller(name, key, frozenset()) for name, key in ("aa", "ab", "ba"))
    with contextlib.ExitStack() as held:

        def hold_all(*callers: Caller) -> int:
            num = 0
            with contextlib.suppress(HeldConnectionsError):
                for num, caller in enumerate(itertools.cycle(callers)):  # noqa: B007
                    held.enter_context(shares.held_by(caller))
            return num

        assert hold_all(alice, same) == 150
        assert hold_all(bob) == 9
        assert hold_all(NOBODY.at("10.0.0.1")) == 1
    assert not shares._held
    with ConnectionShares(1).held_by(alice):
        pass


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_owner_of_many_addresses_is_one_holder(address, network):
    assert network_of(address) == network
    named = Caller("10.1.2.3", "key", frozenset())  # a tenant may be called so
    assert NOBODY.at(address).holder != named.at(address).holder == ("10.1.2.3", "")
