"""A router's ports: where one is taken the others are free again."""

import asyncio
import socket
import struct
from dataclasses import replace

import pytest

from disagg.errors import ConfigError
from disagg.router import ports as ports_module
from disagg.router.options import RouterOptions
from disagg.router.ports import GRPC_OPTIONS, bind_ports, bracketed
from disagg.tls.connections import Connections

HOST = "127.77.0.1"
"""Used by nobody else, so that a number that was free here stays so."""
FREE = RouterOptions(
    "no model", "tiny", host=HOST, admin_host=HOST, http_port=0, admin_port=0, grpc_port=0
)

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""How a gRPC client begins: its settings, none."""
TAKEN = bytes(3) + b"\x04\x01" + bytes(4)
"""That it has the router's."""


def hold(port: int = 0) -> socket.socket:
    """Listen on a port that nobody has.

    Raises:
        OSError: somebody has it.
    """
    held = socket.socket()
    try:
        held.bind((HOST, port))
    except OSError:
        held.close()
        raise
    held.listen()
    return held


def port_of(held: socket.socket) -> int:
    number: int = held.getsockname()[1]
    return number


@pytest.mark.parametrize("taken", ["http_port", "admin_port", "grpc_port"])
async def test_where_one_is_taken_the_others_stay_free(taken):
    with hold() as http, hold() as admin:
        numbers = {"http_port": port_of(http), "admin_port": port_of(admin)}
    with hold() as held:
        wanted = replace(FREE, **(numbers | {taken: port_of(held)}))
        with pytest.raises(ConfigError, match="cannot listen on") as refused:
            bind_ports(wanted, Connections(""), None)
    assert refused.value.param == taken
    for name, number in numbers.items():
        if name != taken:
            hold(number).close()


async def test_what_was_bound_is_held():
    """Control: a port that was not freed is seen."""
    ports = bind_ports(FREE, Connections(""), None)
    for number in (port_of(ports.http), port_of(ports.admin), ports.grpc_port):
        with pytest.raises(OSError, match="in use"):
            hold(number)
    ports.http.close()
    ports.admin.close()
    await ports.grpc_server.stop(None)


@pytest.mark.parametrize(("host", "shown"), [(HOST, HOST), ("::1", "[::1]"), ("a.b", "a.b")])
def test_a_host_stands_before_a_port(host, shown):
    assert bracketed(host) == shown


async def test_calls_that_go_on_in_one_connection_are_bounded():
    """Also those of which only the head has come: the client is told as the connection begins."""
    ports = bind_ports(replace(FREE, requests_max=5), Connections(""), None)
    await ports.grpc_server.start()
    try:
        reader, writer = await asyncio.open_connection(HOST, ports.grpc_port)
        writer.write(HELLO)
        head = await reader.readexactly(9)
        assert head[3] == 4, "the first frame is of settings"
        body = await reader.readexactly(int.from_bytes(head[:3], "big"))
        told = dict(struct.iter_unpack(">HI", body))
        assert told[3] == 4 * 5
        writer.close()
    finally:
        await ports.grpc_server.stop(None)
        ports.http.close()
        ports.admin.close()


async def test_grpc_clients_are_asked_whether_they_are_still_there(monkeypatch):
    """Also those that have no call; here after a second."""
    asks = "grpc.keepalive_time_ms"
    soon = tuple((name, 1000 if name == asks else value) for name, value in GRPC_OPTIONS)
    monkeypatch.setattr(ports_module, "GRPC_OPTIONS", soon)
    ports = bind_ports(FREE, Connections(""), None)
    await ports.grpc_server.start()
    try:
        reader, writer = await asyncio.open_connection(HOST, ports.grpc_port)
        writer.write(HELLO + TAKEN)
        kind = -1
        async with asyncio.timeout(60):
            while kind != 6:  # a ping
                head = await reader.readexactly(9)
                kind = head[3]
                await reader.readexactly(int.from_bytes(head[:3], "big"))
        writer.close()
    finally:
        await ports.grpc_server.stop(None)
        ports.http.close()
        ports.admin.close()


async def test_the_kernel_asks_whether_http_clients_are_still_there():
    ports = bind_ports(FREE, Connections(""), None)
    try:
        for port in (ports.http, ports.admin):
            port.listen()
            with socket.create_connection((HOST, port_of(port)), 60), port.accept()[0] as taken:
                assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                idle_s, again_s, num = (
                    taken.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle_s + again_s * num <= 60
                unsaid_ms = taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert unsaid_ms == FREE.send_timeout_ms
    finally:
        ports.http.close()
        ports.admin.close()
        await ports.grpc_server.stop(None)
