"""Requests that are no message, at a port of a node: INVALID_ARGUMENT, and nothing is logged."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from disagg.errors import ProtocolError
from disagg.tls.connections import Connections
from disagg.wire.v1 import kv_events_pb2, session_pb2, worker_pb2, worker_pb2_grpc

BAD = b"\xff"
PATH = "/disagg.wire.v1.Worker/"


class Worker(worker_pb2_grpc.WorkerServicer):
    """Answers, and refuses one kind of message itself."""

    async def Status(self, request: Any, context: Any) -> Any:
        return worker_pb2.StatusResponse(role="both")

    async def KvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if request.from_sequence == 7:
            raise ProtocolError("seven is not taken")
        yield kv_events_pb2.KvEventBatch(first_sequence=request.from_sequence)

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            yield session_pb2.SessionResponse()


async def ended(call: Any) -> tuple[int, str]:
    """Responses that came, and how the call ended."""
    num = 0
    try:
        async for _ in call:
            num += 1
    except grpc.aio.AioRpcError as error:
        return num, error.code().name
    return num, "OK"


async def test_bytes_that_are_no_message(caplog: pytest.LogCaptureFixture) -> None:
    server = Connections("").server()
    service: Any = Worker  # without the methods that nobody calls
    worker_pb2_grpc.add_WorkerServicer_to_server(service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with caplog.at_level(logging.INFO):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
            channel: Any = opened  # bytes go as they are
            status = channel.unary_unary(PATH + "Status")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await status(BAD)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "StatusRequest" in (refused.value.details() or "")
            assert b"both" in await status(b"")  # control: a message is one

            events = channel.unary_stream(PATH + "KvEvents")
            assert await ended(events(BAD)) == (0, "INVALID_ARGUMENT")
            assert await ended(events(b"")) == (1, "OK")
            seven = kv_events_pb2.KvEventsRequest(from_sequence=7).SerializeToString()
            assert await ended(events(seven)) == (0, "INVALID_ARGUMENT")

            session = channel.stream_stream(PATH + "Session")
            assert await ended(session(iter([b"", BAD, b""]))) == (1, "INVALID_ARGUMENT")
            assert await ended(session(iter([b"", b""]))) == (2, "OK")
    await server.stop(None)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
