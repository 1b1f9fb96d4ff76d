"""A call that was refused is freed with its end, not when the garbage collector comes."""

import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from disagg.errors import ProtocolError
from disagg.tls.authority import create_for_one_run
from disagg.tls.connections import Connections

NUM_CALLS = 5
BOUND_S = 20.0
SERVICE = "of.a.Test"


class Held:
    """What a handler has while it runs, as its request: bytes take no weak references."""


class Refusing:
    """Handlers of every kind, which end each call with an error while another one is handled."""

    def __init__(self, *, raises: bool) -> None:
        self.held: list[weakref.ref[Held]] = []
        self._raises = raises

    async def once(self, request: Any, context: Any) -> None:
        held = Held()
        self.held.append(weakref.ref(held))
        if self._raises:
            raise ProtocolError("not to my taste")
        try:
            raise ValueError("not to my taste")
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def many(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        await self.once(request, context)
        yield b""

    async def both(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        await self.once([one async for one in requests], context)
        yield b""


@pytest.mark.parametrize("name", ["once", "written", "many", "both"])
@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("raises", [True, False])
async def test_a_refused_call_leaves_nothing_to_collect(
    name: str, tls: bool, raises: bool, tmp_path: Path
) -> None:
    connections = Connections(str(create_for_one_run(tmp_path / "certificates")) if tls else "")
    server, service = connections.server(), Refusing(raises=raises)
    handlers = {
        "once": grpc.unary_unary_rpc_method_handler(service.once),
        "written": grpc.unary_stream_rpc_method_handler(service.once),
        "many": grpc.unary_stream_rpc_method_handler(service.many),
        "both": grpc.stream_stream_rpc_method_handler(service.both),
    }
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SERVICE, {name: handlers[name]})]
    )
    address = f"127.0.0.1:{connections.listen(server, '127.0.0.1:0')}"
    await server.start()
    async with connections.channel(address) as opened:
        channel: Any = opened
        path = f"/{SERVICE}/{name}"

        async def ask() -> None:
            if name == "once":
                call = channel.unary_unary(path)(b"")
            elif name == "both":
                call = channel.stream_stream(path)(iter([b""]))
            else:
                call = channel.unary_stream(path)(b"")
            assert await call.details() == "not to my taste"

        gc.collect()
        gc.disable()
        try:
            for _ in range(NUM_CALLS):
                await ask()
            assert len(service.held) == NUM_CALLS
            await server.stop(BOUND_S)  # a client may have its answer before the handler's end
            assert not any(held() for held in service.held)
        finally:
            gc.enable()
