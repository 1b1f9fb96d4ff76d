"""The client: connections that ask again and again, and count what comes."""

import asyncio
import json
import time
from functools import partial
from typing import cast

from benchmarks.router.environment import MODEL

PROMPT = "Say what you see when you look out of the window on a day in November, in a few words. "
"""About 200 bytes with the rest of the body."""


def request(url: str, *, num_tokens: int, stream: bool, prompt: str = PROMPT) -> bytes:
    """A whole HTTP request for a chat answer."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": num_tokens,
            "stream": stream,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url.removeprefix('http://')}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """Sends the next request when an answer is whole.

    Attributes:
        num_chunks: SSE chunks with something of an answer.
        num_answers: that were whole.
        ttft_s: of each answer, until its first byte.
        failed: what came instead of an answer.
    """

    def __init__(self, data: bytes, *, stream: bool) -> None:
        self._data, self._stream = data, stream
        self._tail = b""
        self.num_chunks = self.num_answers = 0
        self.ttft_s: list[float] = []
        self.failed = b""
        self._waits = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is the router that closed it, or `stop`."""
        self.failed = self.failed or b"the connection was closed"

    def data_received(self, data: bytes) -> None:
        """Count."""
        if self._waits:
            self.ttft_s.append(time.perf_counter() - self._asked_s)
            self._waits = False
            if b" 200 OK" not in data[:32]:
                self.failed = data
                self._transport.close()
        if self._stream:
            self.num_chunks += data.count(b'"choices":')
            ended = (self._tail + data).endswith(b"0\r\n\r\n")
        else:
            self._tail += data
            head, _, body = self._tail.partition(b"\r\n\r\n")
            at = head.lower().find(b"content-length:")
            ended = at >= 0 and len(body) >= int(head[at + 15 :].split(b"\r\n", 1)[0])
        self._tail = (self._tail + data)[-5:] if self._stream else self._tail
        if ended:
            self.num_answers += 1
            self._tail = b""
            self._ask()

    def _ask(self) -> None:
        self._waits, self._asked_s = True, time.perf_counter()
        self._transport.write(self._data)

    def stop(self) -> None:
        """Go."""
        self._transport.abort()


def _itself(connection: Connection) -> Connection:
    return connection


class Load:
    """So many connections at once."""

    def __init__(self, url: str, data: bytes, *, num: int, stream: bool) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._where = host, int(port)
        self._all = [Connection(data, stream=stream) for _ in range(num)]

    async def start(self) -> None:
        """Connect all; they ask at once."""
        loop = asyncio.get_running_loop()
        for one in self._all:
            await loop.create_connection(partial(_itself, one), *self._where)

    @property
    def num_chunks(self) -> int:
        """So far."""
        return sum(one.num_chunks for one in self._all)

    @property
    def num_answers(self) -> int:
        """So far."""
        return sum(one.num_answers for one in self._all)

    def take_ttft_s(self) -> list[float]:
        """Of the answers since it was asked last."""
        found = [one_s for one in self._all for one_s in one.ttft_s]
        for one in self._all:
            one.ttft_s.clear()
        return found

    def check(self) -> None:
        """Raise RuntimeError if anything but whole answers came."""
        for one in self._all:
            if one.failed:
                raise RuntimeError(one.failed[:2000].decode(errors="replace"))

    def stop(self) -> None:
        """End all connections."""
        for one in self._all:
            one.stop()
