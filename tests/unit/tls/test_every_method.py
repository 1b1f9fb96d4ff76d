"""Who may call which method: all methods of the wire contract, behind a port of a node."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from disagg.tls.callers import CLIENT_METHODS
from disagg.tls.connections import Connections
from tests.unit.tls.methods import Method, all_methods
from tests.unit.tls.strangers import Caller, client_of, create, node_of, strangers

METHODS = all_methods()
KINDS = ["no TLS", "no certificate", "another authority's", "an expired one"]


class EveryMethod(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # only in the stubs
    """Answers each method with nothing, and notes who got so far."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def service(self, details: Any) -> Any:
        (method,) = [one for one in METHODS if one.path == details.method]

        async def one(request: Any, context: Any) -> bytes:
            self.called.append(method.path)
            return b""

        async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
            self.called.append(method.path)
            yield b""

        made: dict[tuple[bool, bool], Any] = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        handler = many if method.streams_responses else one
        return made[method.streams_requests, method.streams_responses](handler)


Codes = dict[str, grpc.StatusCode | None]


async def call_all(directory: Path, caller: Caller) -> tuple[Codes, list[str]]:
    """How each method ended for that caller, and which handlers were reached."""
    connections, handlers = Connections(str(create(directory))), EveryMethod()
    server = connections.server()
    server.add_generic_rpc_handlers((handlers,))
    port = connections.listen(server, "127.0.0.1:0")
    await server.start()

    def call(method: Method) -> grpc.StatusCode | None:
        with caller.channel(f"127.0.0.1:{port}") as channel:
            return method.call(channel)

    try:
        codes = {one.path: await asyncio.to_thread(call, one) for one in METHODS}
    finally:
        await server.stop(0)
    return codes, handlers.called


def test_the_wire_contract_has_the_methods_of_old() -> None:
    """Control of the search: it finds what is known."""
    names = {(one.service.rpartition(".")[2], one.name) for one in METHODS}
    assert names >= {
        ("Router", "Register"),
        ("Router", "Generate"),
        ("Router", "Match"),
        ("Worker", "Session"),
        ("Worker", "KvEvents"),
        ("Worker", "Peer"),
        ("Worker", "Status"),
    }
    assert {one.path for one in METHODS} >= CLIENT_METHODS


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stranger_reaches_no_method(tmp_path: Path, kind: str) -> None:
    create(tmp_path)
    assert list(strangers(tmp_path)) == KINDS
    codes, reached = await call_all(tmp_path, strangers(tmp_path)[kind])
    assert set(codes.values()) == {None}, codes
    assert reached == []


async def test_a_node_reaches_all_of_them(tmp_path: Path) -> None:
    create(tmp_path)
    codes, reached = await call_all(tmp_path, node_of(tmp_path))
    assert set(codes.values()) == {grpc.StatusCode.OK}, codes
    assert reached == [one.path for one in METHODS]


async def test_a_client_reaches_what_is_meant_for_clients(tmp_path: Path) -> None:
    create(tmp_path)
    codes, reached = await call_all(tmp_path, client_of(tmp_path))
    assert set(reached) == CLIENT_METHODS
    refused = {path for path, code in codes.items() if code is grpc.StatusCode.PERMISSION_DENIED}
    assert refused == {one.path for one in METHODS} - CLIENT_METHODS
