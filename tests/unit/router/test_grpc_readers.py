"""gRPC clients that take nothing of their answers: raw HTTP/2, whose window is theirs to say."""

import asyncio
import logging
import struct

import pytest

from disagg.router.grpc_service import GENERATE
from disagg.wire.v1 import router_pb2, sampling_pb2
from tests.unit.router.scripted_worker import BOUND_S

DATA, HEADERS, SETTINGS, WINDOW_UPDATE = 0, 1, 4, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FIELDS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", GENERATE),
    (":authority", "here"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def without_a_window(request: router_pb2.GenerateRequest) -> bytes:
    """What a client sends for one call, whose answer may have no byte."""
    texts = [text.encode() for field in FIELDS for text in field]
    head = b"".join(
        b"\0" + b"".join(bytes([len(text)]) + text for text in texts[at : at + 2])
        for at in range(0, len(texts), 2)
    )
    data = request.SerializeToString()
    return (
        PREFACE
        + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))
        + frame(SETTINGS, ACK, 0)
        + frame(HEADERS, END_HEADERS, 1, head)
        + frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, len(data)) + data)
    )


async def until_ended(reader: asyncio.StreamReader) -> bytes:
    """Read frames until the call has ended; returns how."""
    while True:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3]))
        if head[3] == HEADERS and head[4] & END_STREAM:
            return payload


async def test_who_takes_nothing_holds_nothing_and_is_told_why(
    open_house, caplog: pytest.LogCaptureFixture
) -> None:
    house = await open_house(send_timeout_ms=300)
    worker = await house.add(gate=asyncio.Semaphore(2))  # it would go on
    sampling = sampling_pb2.SamplingParams(max_tokens=9)
    request = router_pb2.GenerateRequest(model="tiny", token_ids=[5, 6], sampling=sampling)
    with caplog.at_level(logging.WARNING):
        reader, writer = await asyncio.open_connection("127.0.0.1", house.app.grpc_port)
        writer.write(without_a_window(request))
        await house.until(lambda: "given up" in caplog.text, "the end of patience")
        await worker.until(lambda: worker.cancels, "the cancel")
        assert not len(house.app.dispatcher.open_answers)
        writer.write(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 1 << 20)))
        async with asyncio.timeout(BOUND_S):
            end = await until_ended(reader)
        writer.close()
    assert b"limits.send_timeout_ms" in end
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
