"""A worker of the peers without an engine: ``python -m benchmarks.router.http_worker``.

It says one token per stream and step, in chunks that are made before. Its argument: JSON with its
port and the step.
"""

import asyncio
import json
import sys
from typing import cast

from benchmarks.router.environment import MODEL

FRAME = {"id": "chatcmpl-0123456789abcdef", "created": 1_700_000_000, "model": MODEL}
ANSWER = FRAME | {
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": " the the"},
            "logprobs": None,
            "finish_reason": "length",
        }
    ],
    "usage": {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42},
}
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def event(delta: dict[str, str], finish: str | None = None) -> bytes:
    """A chunk of a stream, framed."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    body = FRAME | {"object": "chat.completion.chunk", "choices": [choice]}
    data = b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = CHUNKED + event({"role": "assistant", "content": ""})
TOKEN, LAST = event({"content": " the"}), event({"content": " the"}, "length")
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Workers:
    """All streams, in steps."""

    def __init__(self) -> None:
        self._live: dict[asyncio.Transport, int] = {}

    def add(self, transport: asyncio.Transport, num_tokens: int) -> None:
        """Begin a stream."""
        transport.write(HEAD)
        self._live[transport] = num_tokens

    def leave(self, transport: asyncio.Transport) -> None:
        """Its reader has gone."""
        self._live.pop(transport, None)

    async def run(self, step_s: float) -> None:
        """Say a token in every stream, step by step."""
        loop = asyncio.get_running_loop()
        at_s = loop.time()
        while True:
            at_s += step_s
            await asyncio.sleep(max(0.0, at_s - loop.time()))
            for transport, left in list(self._live.items()):
                if left > 1:
                    transport.write(TOKEN)
                    self._live[transport] = left - 1
                else:
                    transport.write(LAST + DONE)
                    del self._live[transport]


class Connection(asyncio.Protocol):
    """HTTP/1.1 as far as the routers speak it."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep where to write."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Say nothing more."""
        self._workers.leave(self._transport)

    def data_received(self, data: bytes) -> None:
        """Answer what is whole."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            at = head.find(b"content-length:")
            num = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + num:
                return
            body, self._data = self._data[end + 4 : end + 4 + num], self._data[end + 4 + num :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        wanted = json.loads(body) if head.startswith(b"post") and body else {}
        if wanted.get("stream"):
            num = wanted.get("max_tokens") or wanted["max_completion_tokens"]
            self._workers.add(self._transport, num)
            return
        said: object = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        data = json.dumps(ANSWER if "messages" in wanted else said).encode()
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(data), data)
        )


async def main(port: int, step_s: float) -> None:
    """Serve until the process is ended."""
    workers = Workers()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(workers), "127.0.0.1", port
    )
    async with server:
        if step_s:
            await workers.run(step_s)
        await server.serve_forever()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asyncio.run(main(given["port"], given["step_s"]))
