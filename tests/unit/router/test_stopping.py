"""A router that ends: whose request has not come whole, and who does not read."""

import asyncio
import json
import logging

import pytest

from disagg.router.http_connection import STOP_GRACE_S
from disagg.router.http_server import STOP_TIMEOUT_S
from tests.unit.router.scripted_worker import BOUND_S
from tests.unit.router.test_connections import HALF_BODY, connect, connection_of, until_closed
from tests.unit.router.test_http_errors import COMPLETION
from tests.unit.router.test_limits import STREAM, never_reads, read_until


async def stop(house) -> float:
    """Seconds that it took."""
    began_s = asyncio.get_running_loop().time()
    await house.app.stop()
    return asyncio.get_running_loop().time() - began_s


@pytest.fixture(autouse=True)
def no_errors(caplog):
    yield
    assert not [one for one in caplog.get_records("call") if one.levelno >= logging.ERROR]


async def test_half_a_body_is_told_to_go_elsewhere(house):
    reader, writer = await connect(house)
    writer.write(HALF_BODY)
    await house.until(lambda: connection_of(house).cycle is not None, "the head")
    answer = asyncio.create_task(until_closed(reader))
    assert await stop(house) < STOP_TIMEOUT_S
    head, _, body = (await answer).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in head
    assert b"\r\nconnection: close" in head
    assert json.loads(body)["error"]["code"] == "router_stopping"
    writer.close()


async def test_half_a_body_behind_a_request_is_answered_in_its_turn(open_house):
    house = await open_house()
    worker = await house.add(gate=asyncio.Semaphore(0))
    reader, writer = await connect(house)
    body = json.dumps(COMPLETION).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body + HALF_BODY)
    await worker.until(lambda: worker.submits, "the submit")
    answers = asyncio.create_task(until_closed(reader))
    assert await stop(house) < STOP_TIMEOUT_S
    assert b"router_stopping" in await answers
    writer.close()


async def test_an_answer_to_half_a_body_is_not_followed_by_another(house):
    reader, writer = await connect(house)
    writer.write(HALF_BODY.replace(b"/v1/completions", b"/nothing"))
    await reader.readuntil(b"there is no /nothing")
    rest = asyncio.create_task(until_closed(reader))
    await stop(house)
    assert b"HTTP/1.1" not in await rest
    writer.close()


async def test_who_reads_nothing_is_waited_for_a_moment(open_house):
    house = await open_house(drain_timeout_ms=50, send_buffer_bytes=4096)
    await house.add(tokens_per_step=2)
    client = never_reads(house, b"/v1/completions", STREAM)
    await house.until(lambda: house.app._http_server.has_unread, "a stalled writer")
    await house.app.drain()
    assert await stop(house) < STOP_GRACE_S + STOP_TIMEOUT_S / 2
    client.close()


async def test_a_drain_waits_for_the_last_byte(open_house):
    """Of an answer that has been handed over whole."""
    house = await open_house(send_buffer_bytes=4096)
    await house.add(tokens_per_step=2)
    client = never_reads(house, b"/v1/completions", STREAM | {"stream": False})
    await house.until(lambda: house.app._http_server.has_unread, "a stalled writer")
    await house.until(lambda: not len(house.app.dispatcher.open_answers), "the whole answer")
    draining = asyncio.create_task(house.app.drain())
    await asyncio.sleep(0.2)
    assert not draining.done()
    client.settimeout(BOUND_S)
    said = await asyncio.to_thread(read_until, client, b'"usage"')
    await draining
    assert said.startswith(b"HTTP/1.1 200 ")
    client.close()
