"""Heads and bodies that programs read differently: a body to one is a request to another.

Whatever of that kind comes, nothing behind it is served, and the connection is closed.
"""

import asyncio
import json
import re
from typing import Any

import pytest

from disagg.router import http_connection
from tests.unit.router.test_connections import connect, until_closed

STATUS = re.compile(rb"HTTP/1.1 (\d{3}) ")
GOOD = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
LAST = GOOD.replace(b"host", b"connection: close\r\nhost")
SMUGGLED = b"GET /health HTTP/1.1\r\nhost: smuggled\r\n\r\n"
BODY = json.dumps({"model": "tiny", "prompt": [5, 6], "max_tokens": 3}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
WHOLE = POST + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
UPGRADE = POST + b"connection: upgrade\r\nupgrade: h2c\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n"


def chunk(data: bytes, size: bytes = b"") -> bytes:
    return (size or b"%x" % len(data)) + b"\r\n" + data + b"\r\n"


HOSTILE = {
    "two lengths": POST + b"content-length: 5\r\ncontent-length: 7\r\n\r\n12345",
    "two equal lengths": POST + b"content-length: 5\r\ncontent-length: 5\r\n\r\n12345",
    "a list of lengths": POST + b"content-length: 5, 5\r\n\r\n12345",
    "a negative length": POST + b"content-length: -1\r\n\r\n",
    "a length with a sign": POST + b"content-length: +5\r\n\r\n12345",
    "a length in hexadecimal": POST + b"content-length: 0x5\r\n\r\n12345",
    "an empty length": POST + b"content-length:\r\n\r\n",
    "a length with a space": POST + b"content-length: 5 5\r\n\r\n12345",
    "a length above 64 bits": POST + b"content-length: 99999999999999999999\r\n\r\n",
    "a length and chunks": CHUNKED + b"content-length: 5\r\n\r\n0\r\n\r\n",
    "chunks and a length": POST
    + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "another coding": POST + b"transfer-encoding: gzip\r\n\r\n0\r\n\r\n",
    "two codings": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunked in two headers": CHUNKED + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and identity": CHUNKED + b"transfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "xchunked": POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked in quotes": POST + b'transfer-encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "chunked behind a vertical tab": POST + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + b"\r\n0\r\n\r\n",
    "a folded header": POST + b"x: 1\r\n y\r\n\r\n",
    "a folded length": POST + b"content-length:\r\n 5\r\n\r\n12345",
    "a folded first header": b"GET /health HTTP/1.1\r\n host: a\r\nhost: a\r\n\r\n",
    "a space before the colon": POST + b"content-length : 5\r\n\r\n12345",
    "a tab before the colon": CHUNKED.replace(b"encoding:", b"encoding\t:") + b"\r\n0\r\n\r\n",
    "no colon": POST + b"content-length 5\r\n\r\n",
    "no name": POST + b": 5\r\n\r\n",
    "NUL in a name": POST + b"x\x00y: 1\r\n\r\n",
    "NUL in a value": POST + b"x: 1\x002\r\n\r\n",
    "a control character in a value": POST + b"x: 1\x012\r\n\r\n",
    "DEL in a value": POST + b"x: 1\x7f\r\n\r\n",
    "CR in a value": POST + b"x: 1\r2\r\n\r\n",
    "lines that end with LF": POST.replace(b"\r\n", b"\n") + b"\n",
    "one line that ends with LF": POST + b"x: 1\ncontent-length: 5\r\n\r\n12345",
    "lines that end with CR": POST.replace(b"\r\n", b"\r") + b"\r",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two keys": POST + b"authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n",
    "two keys of the other kind": POST + b"x-api-key: a\r\nX-API-Key: a\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "two hosts in HTTP/1.0": b"GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n",
    "HTTP/2.0": b"GET /health HTTP/2.0\r\nhost: a\r\n\r\n",
    "HTTP/0.9": b"GET /health HTTP/0.9\r\nhost: a\r\n\r\n",
    "HTTP/1.2": b"GET /health HTTP/1.2\r\nhost: a\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a version in small letters": b"GET /health http/1.1\r\nhost: a\r\n\r\n",
    "RTSP's version": b"GET /health RTSP/1.0\r\nhost: a\r\n\r\n",
    "RTSP's version with a body": WHOLE.replace(b"HTTP", b"RTSP"),
    "RTSP's method": b"DESCRIBE /health RTSP/1.0\r\nhost: a\r\n\r\n",
    "RTSP's method in HTTP": b"DESCRIBE /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "ICE's version": b"GET /health ICE/1.0\r\nhost: a\r\n\r\n",
    "ICE's method": b"SOURCE /health ICE/1.0\r\nhost: a\r\n\r\n",
    "another protocol": b"GET /health HTTPS/1.1\r\nhost: a\r\n\r\n",
    "a version of two digits": b"GET /health HTTP/1.10\r\nhost: a\r\n\r\n",
    "a version with a zero before it": b"GET /health HTTP/01.1\r\nhost: a\r\n\r\n",
    "a space behind the version": b"GET /health HTTP/1.1 \r\nhost: a\r\n\r\n",
    "two spaces before the version": b"GET /health  HTTP/1.1\r\nhost: a\r\n\r\n",
    "two spaces before the target": b"GET  /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "a tab before the version": b"GET /health\tHTTP/1.1\r\nhost: a\r\n\r\n",
    "a method in small letters": b"get /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "a method that begins with a capital": b"Get /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "a target without a slash": b"GET health HTTP/1.1\r\nhost: a\r\n\r\n",
    "a target with a fragment": b"GET /health#x HTTP/1.1\r\nhost: a\r\n\r\n",
    "a backslash as the target": b"GET \\health HTTP/1.1\r\nhost: a\r\n\r\n",
    "a host with a space": b"GET /health HTTP/1.1\r\nhost: a b\r\n\r\n",
    "a list of hosts": b"GET /health HTTP/1.1\r\nhost: a, b\r\n\r\n",
    "a host with a path": b"GET /health HTTP/1.1\r\nhost: a/b\r\n\r\n",
    "a host with a user": b"GET /health HTTP/1.1\r\nhost: a@b\r\n\r\n",
    "a host with bytes above ASCII": b"GET /health HTTP/1.1\r\nhost: \xff\r\n\r\n",
    "another protocol and two lengths": UPGRADE
    + b"content-length: 5\r\ncontent-length: 7\r\n\r\n12345",
    "another protocol and a length and chunks": UPGRADE
    + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "another protocol and two codings": UPGRADE
    + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a space in the target": b"GET /he alth HTTP/1.1\r\nhost: a\r\n\r\n",
    "a tab before the target": b"GET\t/health HTTP/1.1\r\nhost: a\r\n\r\n",
    "NUL in the target": b"GET /hea\x00lth HTTP/1.1\r\nhost: a\r\n\r\n",
    "bytes above ASCII in the target": b"GET /\xc3\xbf HTTP/1.1\r\nhost: a\r\n\r\n",
    "no method": b" /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "a method with NUL": b"G\x00T /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "a chunk's size with a sign": CHUNKED + b"\r\n" + chunk(BODY, b"+2a"),
    "a chunk's size with 0x": CHUNKED + b"\r\n" + chunk(BODY, b"0x2a"),
    "a chunk's size of no digits": CHUNKED + b"\r\n" + chunk(BODY, b"zz"),
    "no size of a chunk": CHUNKED + b"\r\n\r\n0\r\n\r\n",
    "a chunk's size above 64 bits": CHUNKED + b"\r\n" + chunk(BODY, b"f" * 17),
    "a chunk's size with a space": CHUNKED + b"\r\n" + chunk(BODY, b"%x " % len(BODY)),
    "a chunk longer than its size": CHUNKED + b"\r\n" + chunk(BODY + b"xx", b"%x" % len(BODY)),
    "a chunk's size that ends with LF": CHUNKED + b"\r\n%x\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "a chunk that ends with LF": CHUNKED + b"\r\n%x\r\n%b\n0\r\n\r\n" % (len(BODY), BODY),
    "LF in a chunk's extension": CHUNKED + b"\r\n" + chunk(BODY, b"%x;a\nb" % len(BODY)),
    "an extension that ends with LF": CHUNKED + b"\r\n%x;a\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "CRLF in an extension's quotes": CHUNKED + b"\r\n" + chunk(BODY, b'%x;a="\r\n"' % len(BODY)),
    "NUL in a chunk's extension": CHUNKED + b"\r\n" + chunk(BODY, b"%x;\x00" % len(BODY)),
    "a space before an extension": CHUNKED + b"\r\n" + chunk(BODY, b"%x ;a" % len(BODY)),
    "a length in a trailer": CHUNKED + b"\r\n0\r\ncontent-length: 5\r\n\r\n12345",
    "a coding in a trailer": CHUNKED + b"\r\n0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a trailer that ends with LF": CHUNKED + b"\r\n0\r\nx: y\n\r\n",
    "trailers that end with LF": CHUNKED + b"\r\n0\r\n\n",
    "a folded trailer": CHUNKED + b"\r\n0\r\nx: y\r\n z\r\n\r\n",
    "a space before a trailer's colon": CHUNKED + b"\r\n0\r\nx : y\r\n\r\n",
    "NUL in a trailer": CHUNKED + b"\r\n0\r\nx: \x00\r\n\r\n",
    "no end of the chunks": CHUNKED + b"\r\n0\r\n",
    "a chunk that ends with CR": CHUNKED + b"\r\n%x\r\n%b\r0\r\n\r\n" % (len(BODY), BODY),
}


async def answers_to(house: Any, *parts: bytes) -> bytes:
    """All that comes for these bytes, which end with a connection that is to be closed."""
    reader, writer = await connect(house)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0)
    try:
        return await until_closed(reader)
    finally:
        writer.close()


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "byte by byte"])
async def test_nothing_behind_a_hostile_head_is_served(open_house, in_pieces):
    house = await open_house()
    worker = await house.add()
    failures = {}
    for name, sent in HOSTILE.items():
        data = sent + SMUGGLED
        parts = [data[at : at + 1] for at in range(len(data))] if in_pieces else [data]
        try:
            said = await answers_to(house, *parts)
        except (ConnectionError, TimeoutError) as error:
            if not (in_pieces and isinstance(error, ConnectionError)):  # a reset: it was refused
                failures[name] = repr(error)
            continue
        if not said.startswith(b"HTTP/1.1 400 ") or len(STATUS.findall(said)) != 1:
            failures[name] = said[:300].decode("latin-1")
    assert not failures, "\n".join(f"{name}: {said}" for name, said in failures.items())
    assert worker.submits == []


@pytest.mark.parametrize("line", [b"GET /health RTSP/1.1", b"GET  /health HTTP/1.1"])
async def test_a_request_line_is_judged_wherever_it_begins(house, line):
    """Behind another request, in its packet or in the next; and the error says what is wrong."""
    hostile = line + b"\r\nhost: a\r\n\r\n"
    before = WHOLE.replace(b"POST /v1/completions", b"POST /v1/completions?health")
    for parts in ([before + hostile], [before, hostile], [before[:-3], before[-3:] + hostile]):
        said = await answers_to(house, *parts)
        assert STATUS.findall(said) == [b"200", b"400"]
        assert b"a request line is METHOD TARGET HTTP/1.1" in said


RIGHT = b"GET /health HTTP/1.1\r\n"
LINES_ELSEWHERE = {
    "its own line": GOOD,
    "an empty body": RIGHT + b"host: a\r\ncontent-length: 0\r\n\r\n",
    "its body": RIGHT + b"host: a\r\ncontent-length: %d\r\n\r\n%b" % (len(RIGHT), RIGHT),
    "the end of its body": RIGHT
    + b"host: a\r\ncontent-length: %d\r\n\r\n{}%b" % (len(RIGHT) + 2, RIGHT),
    "a chunk": RIGHT
    + b"host: a\r\ntransfer-encoding: chunked\r\n\r\n"
    + chunk(b"x") * 20
    + chunk(b"0\r\n\r\n" + RIGHT)
    + chunk(b""),
    "a trailer": RIGHT + b"host: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: " + RIGHT + b"\r\n",
}


@pytest.mark.parametrize("line", [b"GET /health RTSP/1.1", b"GET  /health HTTP/1.1"])
async def test_a_line_elsewhere_does_not_stand_for_it(house, line):
    """As it must have been it is in the request before it, or in its own headers or body."""
    hostile = (
        line + b"\r\nhost: a\r\n\r\n",
        line + b"\r\nhost: a\r\nx: " + RIGHT + b"\r\n",
        line + b"\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(RIGHT), RIGHT),
        line + b"\r\nhost: a\r\n\r\n" + GOOD,
    )
    for name, before in LINES_ELSEWHERE.items():
        for sent in hostile:
            data = before + sent
            for parts in ([data], [before[:-3], before[-3:] + sent], [data[:-3], data[-3:]]):
                said = await answers_to(house, *parts)
                assert STATUS.findall(said) == [b"200", b"400"], (name, sent, said)
        said = await answers_to(house, before + LAST)  # negative control
        assert STATUS.findall(said) == [b"200", b"200"], (name, said)


@pytest.mark.parametrize("host", [b"", b"a:1", b"a_b.c", b"127.0.0.1:8000", b"[::1]:80 ", b"\ta"])
async def test_hosts_that_are_some(house, host):
    """Negative control. Empty lines before a request are ignored, as HTTP asks."""
    said = await answers_to(house, b"\r\n\r\n" + LAST.replace(b"host: a", b"host: " + host))
    assert STATUS.findall(said) == [b"200"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("two keys", "more than one Authorization header"),
        ("two keys of the other kind", "more than one X-Api-Key header"),
        ("no host", "there are 0 Host headers"),
        ("two hosts in HTTP/1.0", "there are 2 Host headers"),
        ("a host with a path", "the host is to be a name or an address"),
        ("two codings", "Transfer-Encoding can be chunked alone"),
        ("chunks in HTTP/1.0", "Transfer-Encoding can be chunked alone"),
        ("HTTP/2.0", "its version is another one"),
        ("a target with a fragment", "a target has visible ASCII characters alone"),
        ("two lengths", "Content-Length"),  # by the parser, as the next ones
        ("a length and chunks", "Content-Length"),
        ("a method in small letters", "method"),
    ],
)
async def test_the_error_says_what_is_wrong(house, name, said):
    _, _, body = (await answers_to(house, HOSTILE[name])).partition(b"\r\n\r\n")
    assert said in json.loads(body)["error"]["message"]


async def test_what_the_parser_alone_would_take(open_house, monkeypatch):
    """Negative control: some of these are refused by our own check, and are served without it."""
    monkeypatch.setattr(http_connection, "check_head", lambda *head: None)
    monkeypatch.setattr(http_connection, "check_line", lambda *head: None)
    house = await open_house()
    served = {
        "no host": 2,
        "two hosts": 2,
        "HTTP/2.0": 1,
        "RTSP's version": 1,
        "two spaces before the target": 2,
        "a list of hosts": 2,
        "two codings": 2,
        "chunks in HTTP/1.0": 1,
    }
    for name, num in served.items():
        said = await answers_to(house, HOSTILE[name] + LAST)
        assert len(STATUS.findall(said)) == num, (name, said)
        assert b"this is not HTTP/1.1" not in said, (name, said)
