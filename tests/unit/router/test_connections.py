"""What strangers and proxies send: half requests, too many connections, odd ids, long names."""

import asyncio
import json
import re
from typing import Any

import grpc
import pytest

from disagg.router import http_connection
from disagg.wire.v1 import router_pb2
from disagg.wire.v1.router_pb2_grpc import RouterStub
from tests.unit.router.scripted_worker import BOUND_S
from tests.unit.router.test_http_errors import COMPLETION, check_error

HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
HALF_BODY = HALF_HEAD + b'content-type: application/json\r\ncontent-length: 100\r\n\r\n{"model'
ASKING = HALF_BODY.partition(b"{")[0].replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n")
"""Is answered by a 100, and then in progress."""
WHOLE = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


async def connect(house, source: str = "127.0.0.1"):
    """A connection from an address of this machine."""
    at = ("127.0.0.1", house.app.http_port)
    return await asyncio.open_connection(*at, local_addr=(source, 0))


def connection_of(house):
    """The router's side of the only connection."""
    (connection,) = house.app._http_server.server_state.connections
    return connection


async def until_closed(reader):
    """All that comes before the router closes the connection."""
    async with asyncio.timeout(BOUND_S):
        return await reader.read()


async def one_answer(reader):
    """The next one, on a connection that stays."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = re.findall(rb"content-length: (\d+)", head)
    return head + await reader.readexactly(int(length))


@pytest.mark.parametrize("sent", [b"", b"P", HALF_HEAD], ids=["nothing", "a byte", "half a head"])
async def test_a_connection_without_a_whole_head_is_closed(open_house, sent):
    house = await open_house(receive_timeout_ms=200)
    connections = [await connect(house) for _ in range(20)]
    for _, writer in connections:
        writer.write(sent)
    for reader, writer in connections:
        assert await until_closed(reader) == b""
        writer.close()
    assert (await house.http.get("/health")).status_code == 200


async def test_bytes_without_a_whole_head_do_not_prolong(open_house):
    house = await open_house(receive_timeout_ms=200)
    reader, writer = await connect(house)
    writer.write(HALF_HEAD)

    async def drip():
        while True:  # for as long as the router listens
            writer.write(b"x: y\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    try:
        assert await until_closed(reader) == b""
    except ConnectionResetError:
        pass
    finally:
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)


@pytest.mark.parametrize("then", [b"", HALF_HEAD], ids=["idle", "half a head"])
async def test_a_connection_that_was_used_is_closed_too(open_house, then):
    house = await open_house(receive_timeout_ms=200)
    reader, writer = await connect(house)
    writer.write(WHOLE + WHOLE + then)
    assert (await until_closed(reader)).count(b"200 OK") == 2
    writer.close()


async def test_a_half_body_is_answered_408(open_house):
    house = await open_house(receive_timeout_ms=200)
    reader, writer = await connect(house)
    writer.write(HALF_BODY)
    answer = await until_closed(reader)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer
    writer.close()


def expecting(path: bytes, num_bytes: int, version: bytes = b"1.1") -> bytes:
    """The head of a request whose body of JSON comes when it is asked for."""
    return (
        b"POST %b HTTP/%b\r\nhost: a\r\nexpect: 100-continue\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    ) % (path, version, num_bytes)


@pytest.mark.parametrize(
    ("path", "num_bytes", "status"),
    [
        (b"/v1/completions", 1 << 40, b"413"),
        (b"/nothing", 10, b"404"),
        (b"/health", 10, b"405"),
    ],
)
async def test_a_body_that_is_not_asked_for_ends_the_connection(house, path, num_bytes, status):
    """Whether the client still sends it cannot be known, so nothing behind it can be read."""
    reader, writer = await connect(house)
    writer.write(expecting(path, num_bytes))
    answer = await until_closed(reader)
    assert answer.startswith(b"HTTP/1.1 %b " % status)
    assert b"\r\nconnection: close\r\n" in answer
    writer.close()


async def test_a_stranger_is_asked_for_no_body(open_house):
    house = await open_house(api_keys='{"keys": []}')
    reader, writer = await connect(house)
    writer.write(expecting(b"/v1/completions", 10))
    answer = await until_closed(reader)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"\r\nconnection: close\r\n" in answer
    writer.close()


async def test_a_body_that_comes_does_not_end_the_connection(house):
    """Negative control: asked for it is read, and sent unasked it is no next request."""
    reader, writer = await connect(house)
    body = json.dumps(COMPLETION).encode()
    writer.write(expecting(b"/v1/completions", len(body)))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
    writer.write(expecting(b"/nothing", len(WHOLE)) + WHOLE[:5])
    assert (await one_answer(reader)).startswith(b"HTTP/1.1 404 ")
    writer.write(WHOLE[5:] + expecting(b"/nothing", len(WHOLE)) + WHOLE)
    assert (await one_answer(reader)).startswith(b"HTTP/1.1 404 ")
    writer.write(WHOLE.replace(b"host", b"connection: close\r\nhost"))
    assert (await until_closed(reader)).count(b"HTTP/1.1 ") == 1
    writer.close()


async def test_http_1_0_knows_no_100_continue(house):
    reader, writer = await connect(house)
    body = json.dumps(COMPLETION).encode()
    writer.write(expecting(b"/v1/completions", len(body), b"1.0"))
    only = asyncio.create_task(until_closed(reader))
    await house.until(lambda: connection_of(house).cycle is not None, "the head")
    writer.write(body)
    assert (await only).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_who_closes_its_sending_side_has_left(open_house):
    """It looks like who has gone altogether: what would be computed for that one is given up."""
    house = await open_house()
    worker = await house.add(gate=asyncio.Semaphore(0))
    reader, writer = await connect(house)
    body = json.dumps(COMPLETION).encode()
    head = expecting(b"/v1/completions", len(body)).replace(b"expect: 100-continue\r\n", b"")
    writer.write(head + body)
    await worker.until(lambda: worker.submits, "the submit")
    writer.write_eof()
    await worker.until(lambda: worker.cancels, "the cancel")
    assert await until_closed(reader) == b""
    writer.close()


async def test_a_long_answer_is_not_cut(open_house):
    """Control: the bound is on what the client sends, not on what it waits for."""
    house = await open_house(receive_timeout_ms=400)
    gate = asyncio.Semaphore(0)
    await house.add(gate=gate)
    request = asyncio.create_task(house.http.post("/v1/completions", json=COMPLETION))
    loop = asyncio.get_running_loop()
    passed = asyncio.Event()
    loop.call_later(1.6, passed.set)  # four times the bound
    await passed.wait()
    for _ in range(3):
        gate.release()
    assert (await request).status_code == 200


async def test_connections_are_bounded(open_house):
    house = await open_house(connections_max=3)
    held = [await connect(house, f"127.0.0.{n}") for n in range(2, 5)]  # none has all alone
    for reader, writer in held:  # each is asked for the body of its request
        writer.write(ASKING)
        assert (await reader.readline()).startswith(b"HTTP/1.1 100 ")
    reader, writer = await connect(house)
    assert (await until_closed(reader)).startswith(b"HTTP/1.1 503 ")
    writer.close()
    for _, writer in held:
        writer.close()
    state = house.app._http_server.server_state
    await house.until(lambda: not state.connections, "the connections closed")
    reader, writer = await connect(house)
    writer.write(WHOLE)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_new_connection_takes_the_place_of_the_one_idle_for_longest(
    open_house, caplog, monkeypatch
):
    monkeypatch.setattr(http_connection, "IDLE_MIN_S", 0.0)
    house = await open_house(connections_max=3)
    busy, longest, last = [await connect(house) for _ in range(3)]
    busy[1].write(ASKING)
    assert (await busy[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    for reader, writer in (longest, last):
        writer.write(WHOLE)
        await one_answer(reader)
    longest[1].write(HALF_HEAD)  # no request yet
    late = await connect(house)
    assert await until_closed(longest[0]) == b""
    assert "limits.connections_max" in caplog.text
    for reader, writer in (late, last):
        writer.write(WHOLE)
        await one_answer(reader)
    busy[1].write(b"x" * 100)
    assert (await busy[0].readline()).startswith(b"HTTP/1.1 400 ")
    for _, writer in (busy, longest, last, late):
        writer.close()


@pytest.mark.parametrize(
    "given",
    ["", "bad id", "tab\tid", "<script>", 'a"b', "x" * 129, "caf\xe9"],
    ids=ascii,
)
async def test_an_odd_request_id_is_replaced_by_an_own_one(house, given):
    headers = {"x-request-id": given.encode("latin-1")}
    response = await house.http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert response.status_code == 200
    own = response.headers["x-request-id"]
    assert own
    assert own != given
    assert response.json()["id"] == f"cmpl-{own}"
    assert (await house.admin.get(f"/v1/disagg/requests/{own}")).status_code == 200


@pytest.mark.parametrize("given", ["Root=1-67891233-abc", "a/b+c==", "0af7:1@x|y~z", "x" * 128])
async def test_ids_of_proxies_are_kept(house, given):
    headers = {"x-request-id": given}
    response = await house.http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert response.headers["x-request-id"] == given
    assert (await house.admin.get(f"/v1/disagg/requests/{given}")).status_code == 200


async def test_long_names_are_not_echoed(house):
    body = COMPLETION | {"model": "x" * 1_000_000}
    response = await house.http.post("/v1/completions", json=body)
    check_error(response, 404, "model", "model_not_found")
    assert len(response.content) < 1000
    for path in ("/v1/models/", "/v1/disagg/requests/", "/nothing/"):
        for port in (house.http, house.admin):
            response = await port.get(path + "x" * 10_000)
            assert response.status_code == 404
            assert len(response.content) < 1000


async def test_a_cache_salt_is_bounded_in_grpc_as_in_http(house):
    status = grpc.StatusCode.INVALID_ARGUMENT
    async with grpc.aio.insecure_channel(f"127.0.0.1:{house.app.grpc_port}") as channel:
        stub: Any = RouterStub(channel)
        for length, fits in ((256, True), (257, False)):
            request = {"model": "tiny", "token_ids": [5, 6], "cache_salt": "s" * length}
            response = await house.http.post(
                "/v1/completions", json=COMPLETION | {"cache_salt": "s" * length}
            )
            assert response.status_code == (200 if fits else 400)
            for call in (
                lambda given: stub.Generate(router_pb2.GenerateRequest(**given)).read(),
                lambda given: stub.Match(router_pb2.MatchRequest(**given)),
            ):
                if fits:
                    await call(request)
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(request)
                assert caught.value.code() is status
                assert (caught.value.details() or "").startswith("cache_salt: ")
