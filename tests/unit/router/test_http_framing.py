"""Several requests and answers on one connection: their order, their bounds, what is no header."""

import asyncio
import contextlib
import re
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from disagg.router import http_connection
from tests.unit.router.test_connections import connect, one_answer, until_closed
from tests.unit.router.test_hostile_heads import (
    BODY,
    CHUNKED,
    GOOD,
    LAST,
    POST,
    SMUGGLED,
    STATUS,
    WHOLE,
    answers_to,
    chunk,
)


async def test_requests_that_follow_each_other_are_served(house):
    """Negative control: what is not hostile is served in its order, however it is cut."""
    parts = CHUNKED + b"\r\n" + chunk(BODY[:9], b"9;x=1") + chunk(BODY[9:]) + chunk(b"")
    data = WHOLE + parts + GOOD + WHOLE + LAST
    for size in (len(data), 1, 3, 7):
        said = await answers_to(house, *(data[at : at + size] for at in range(0, len(data), size)))
        assert STATUS.findall(said) == [b"200"] * 5
        order = re.findall(rb'text_completion|"status":"ok"', said)
        assert order == [b"text_completion"] * 2 + [
            b'"status":"ok"',
            b"text_completion",
            b'"status":"ok"',
        ]


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY),
        b"transfer-encoding: chunked\r\n\r\n" + chunk(BODY) + chunk(b""),
    ],
    ids=["length", "chunks"],
)
async def test_who_would_speak_another_protocol_is_answered_in_this_one(house, framing):
    """As Java's client asks for HTTP/2 in its first request, with a body."""
    asked = POST + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    data = asked + framing + asked + framing + LAST
    for size in (len(data), 1):
        said = await answers_to(house, *(data[at : at + size] for at in range(0, len(data), size)))
        assert STATUS.findall(said) == [b"200"] * 3, said


async def test_a_length_behind_too_many_headers_is_a_length(open_house):
    """What it frames is no request, also where the body is left to another protocol."""
    house = await open_house(headers_max=8)
    for upgrade in (b"", b"connection: upgrade\r\nupgrade: h2c\r\n"):
        many = b"".join(b"x%d: y\r\n" % n for n in range(20))
        head = POST + upgrade + many + b"content-length: %d\r\n\r\n" % len(SMUGGLED)
        said = await answers_to(house, head + SMUGGLED + SMUGGLED)
        assert STATUS.findall(said) == [b"431"]


@pytest.mark.parametrize("between", [b"", b"\r\n", b"\r\n\r\n"], ids=["", "a line", "two lines"])
async def test_a_request_behind_a_body_is_read_wherever_packets_end(house, between):
    """Also where the body begins and ends with empty lines, which HTTP ignores before requests."""
    body = b"\r\n\r\n\n" + BODY + b"\r\n\r\n"
    framings = (
        b"content-length: %d\r\n\r\n%b" % (len(body), body),
        b"transfer-encoding: chunked\r\n\r\n" + chunk(body) + chunk(b""),
        b"transfer-encoding: chunked\r\n\r\n" + chunk(body) + b"0\r\nx: y\r\n\r\n",
    )
    for framing in framings:
        whole = POST + framing
        data = whole + between + LAST
        for cut in range(len(whole) - 8, len(whole) + len(between) + 8):
            said = await answers_to(house, data[:cut], data[cut:])
            assert STATUS.findall(said) == [b"200", b"200"], (framing, cut, said)


@pytest.mark.parametrize("trailer", [b"connection: upgrade\r\nupgrade: h2c\r\n", b"host: b\r\n"])
async def test_trailers_change_nothing(house, trailer):
    sent = CHUNKED + b"\r\n" + chunk(BODY) + b"0\r\n" + trailer + b"\r\n"
    for parts in ([sent + LAST], [sent, LAST]):
        said = await answers_to(house, *parts)
        assert STATUS.findall(said) == [b"200", b"200"]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://a/health", 200),
        (b"http://a:80/health?x", 200),
        (b"HTTPS://[::1]/health", 200),
        (b"http://other/health", 200),  # in place of what the header says
        (b"http://a/he%61lth", 200),
        (b"http://a", 404),
        (b"http://a?/health", 404),
        (b"http://a//health", 404),
        (b"http://a/http://a/health", 404),
        (b"http:///health", 404),
        (b"http:/health", 400),
        (b"//a/health", 404),
        (b"ftp://a/health", 404),
        (b"http://user@a/health", 400),
        (b"http://a,b/health", 400),
        (b"http://a/health#x", 400),
    ],
)
async def test_a_target_may_name_its_host(house, target, status):
    """As whoever takes the router for a proxy sends it; `status` is also that of what follows."""
    line = b"GET %b HTTP/1.1\r\n" % target
    said = await answers_to(house, GOOD.replace(b"GET /health HTTP/1.1\r\n", line) + LAST)
    statuses = [b"%d" % status] + [b"200"] * (status != 400)
    assert STATUS.findall(said) == statuses, said


async def test_a_completion_may_name_its_host(house):
    said = await answers_to(house, WHOLE.replace(b"/v1", b"http://a:8000/v1", 1) + LAST)
    assert STATUS.findall(said) == [b"200", b"200"]
    assert b"text_completion" in said


async def test_a_tunnel_is_no_page(house):
    sent = b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\nconnection: close\r\n\r\n" + SMUGGLED
    said = await answers_to(house, sent)
    assert STATUS.findall(said) == [b"404"]


async def test_trailers_are_no_headers(house):
    trailer = b"x-request-id: trailed\r\nauthorization: Bearer x\r\n"
    sent = CHUNKED + b"connection: close\r\n\r\n" + chunk(BODY) + b"0\r\n" + trailer + b"\r\n"
    said = await answers_to(house, sent)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"trailed" not in said


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /" + b"y" * 64,
        b"GET / HTTP/1.1\r\nx: " + b"y" * 64,
        b"GET / HTTP/1.1\r\n" + b"y" * 64,
        CHUNKED + b"\r\n5;" + b"y" * 64,
        CHUNKED + b"\r\n" + chunk(b"12345") + b"0\r\nx: " + b"y" * 64,
        b"\r\n" * 64,
    ],
    ids=["target", "value", "name", "extension", "trailer", "empty lines"],
)
async def test_what_never_ends_is_bounded(open_house, endless):
    house = await open_house(header_bytes_max=2000)
    reader, writer = await connect(house)
    answer = asyncio.create_task(until_closed(reader))
    writer.write(endless)
    num = 0
    with contextlib.suppress(ConnectionError):  # a reset, when it has closed
        while not answer.done() and num < 1_000_000:
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(endless[-64:])
            num += 64
    assert num < 1_000_000
    with contextlib.suppress(ConnectionError):
        assert (await answer).startswith(b"HTTP/1.1 431 ")
    writer.close()


async def test_a_half_head_behind_a_body_is_counted_by_itself(open_house):
    house = await open_house(header_bytes_max=2000)
    await house.add()
    body = BODY.ljust(1900)
    whole = POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    half = LAST.replace(b"host", b"x: " + b"y" * 1500 + b"\r\nhost")
    for at in range(1, len(half), 300):
        said = await answers_to(house, whole[:50], whole[50:] + half[:at], half[at:])
        assert STATUS.findall(said) == [b"200"] * 2


async def test_what_is_wrong_is_answered_behind_what_came_before(open_house):
    gate = asyncio.Semaphore(0)
    house = await open_house()
    worker = await house.add(gate=gate)
    reader, writer = await connect(house)
    writer.write(WHOLE + GOOD + b"\x16\x03 no HTTP\r\n\r\n" + SMUGGLED)
    await worker.until(lambda: worker.submits, "the submit")
    for _ in range(3):
        gate.release()
    said = await until_closed(reader)
    assert STATUS.findall(said) == [b"200", b"200", b"400"]
    writer.close()


async def test_few_requests_wait_on_a_connection(open_house):
    gate = asyncio.Semaphore(0)
    house = await open_house()
    worker = await house.add(gate=gate)
    reader, writer = await connect(house)
    writer.write(WHOLE + GOOD * 100)
    await worker.until(lambda: worker.submits, "the submit")
    for _ in range(3):
        gate.release()
    said = await until_closed(reader)
    assert STATUS.findall(said) == [b"200"] * (1 + http_connection.WAITING_MAX) + [b"429"]
    assert b"\r\nretry-after: 1\r\n" in said[said.index(b"HTTP/1.1 429") :]
    writer.close()


async def test_who_leaves_while_others_wait_behind_ends_its_request(open_house):
    gate = asyncio.Semaphore(0)
    house = await open_house()
    worker = await house.add(gate=gate)
    _, writer = await connect(house)
    writer.write(WHOLE + WHOLE)
    await worker.until(lambda: worker.submits, "the submit")
    writer.transport.abort()
    await worker.until(lambda: worker.cancels, "the cancel")
    assert len(worker.submits) == 1


@pytest.mark.parametrize("behind", [GOOD, WHOLE])
async def test_who_leaves_after_another_request_ends_the_one_before(open_house, behind):
    house = await open_house()
    worker = await house.add(gate=asyncio.Semaphore(0))
    _, writer = await connect(house)
    writer.write(WHOLE)
    await worker.until(lambda: worker.submits, "the submit")
    writer.write(behind)
    connection = await only_connection(house)
    await house.until(lambda: connection.pipeline, "the next one to wait")
    writer.transport.abort()
    await worker.until(lambda: worker.cancels, "the cancel")
    assert len(worker.submits) == 1


async def test_bodies_that_wait_are_bounded_together(open_house):
    gate = asyncio.Semaphore(0)
    house = await open_house()
    worker = await house.add(gate=gate)
    reader, writer = await connect(house)
    writer.write(WHOLE)
    await worker.until(lambda: worker.submits, "the submit")
    size = 10 * (HIGH_WATER_LIMIT // 4)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
    body = b"content-length: %d\r\n\r\n" % (size // 10) + b" " * (size // 10)
    writer.write((head + body) * 10)
    connection = await only_connection(house)
    await house.until(lambda: connection.flow.read_paused, "it to read no more")
    assert len(connection.pipeline) < 10
    for _ in range(3):
        gate.release()
    for _ in range(11):  # and all are answered
        await one_answer(reader)
    writer.close()


@pytest.mark.parametrize("blanks", [b" ", b"\t ", b"  "])
async def test_blanks_behind_a_value_are_none_of_it(house, blanks):
    said = await answers_to(house, spaced(blanks) + LAST)
    assert STATUS.findall(said) == [b"200"] * 2


def spaced(blanks: bytes) -> bytes:
    """`WHOLE` with blanks behind each of its headers."""
    head, _, body = WHOLE.partition(b"\r\n\r\n")
    line, _, fields = head.partition(b"\r\n")
    fields = b"\r\n".join(field + blanks for field in fields.split(b"\r\n"))
    return line + b"\r\n" + fields + b"\r\n\r\n" + body


async def only_connection(house):
    """The router's side of the only connection."""
    await house.until(lambda: house.app._http_server.server_state.connections, "the connection")
    (connection,) = house.app._http_server.server_state.connections
    return connection


async def written_to(house):
    """What is written to the only connection, from now on."""
    writes: list[bytes] = []
    connection = await only_connection(house)
    send = connection.transport.write

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(connection_transport, name)

        def write(self, data: bytes) -> None:
            writes.append(data)
            send(data)

    connection_transport, connection.transport = connection.transport, Counted()
    return writes


async def test_a_small_answer_is_one_write(house):
    reader, writer = await connect(house)
    writes = await written_to(house)
    writer.write(POST + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY))
    await reader.readuntil(b"}}")
    assert len(writes) == 1
    writer.close()


async def test_the_last_chunk_of_a_stream_leaves_with_its_end(house):
    reader, writer = await connect(house)
    writes = await written_to(house)
    body = BODY.replace(b"{", b'{"stream": true, ', 1)
    writer.write(POST + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    await reader.readuntil(b"0\r\n\r\n")
    assert b'"finish_reason":"length"' in writes[-1]
    assert writes[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()


async def test_requests_set_no_timers(house):
    reader, writer = await connect(house)
    timer = (connection := await only_connection(house)).timeout_keep_alive_task
    for _ in range(3):
        writer.write(POST + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY))
        await reader.readuntil(b"}}")
    assert timer is not None
    assert connection.timeout_keep_alive_task is timer
    writer.close()


async def test_a_broken_body_behind_its_answer_is_not_answered_again(open_house):
    house = await open_house(body_bytes_max=1024)
    reader, writer = await connect(house)
    writer.write(CHUNKED + b"\r\n" + chunk(b"x" * 2000))
    assert b" 413 " in await reader.readline()
    writer.write(b"no size\r\n\r\n" + SMUGGLED)
    assert not STATUS.findall(await until_closed(reader))
    writer.close()


async def test_a_body_behind_too_many_headers_is_no_request(open_house):
    """Neither where the parser leaves the body to another protocol."""
    house = await open_house(headers_max=20)
    many = b"".join(b"x-%d: y\r\n" % number for number in range(30))
    for upgrade in (b"", b"connection: upgrade\r\nupgrade: x\r\n"):
        length = b"content-length: %d\r\n\r\n" % len(SMUGGLED)
        said = await answers_to(house, POST + upgrade + many + length + SMUGGLED)
        assert STATUS.findall(said) == [b"431"]
