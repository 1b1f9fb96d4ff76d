"""One HTTP request and its answer over raw ASGI."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from disagg.errors import (
    CancelledError,
    CapacityError,
    DisaggError,
    RequestError,
)
from disagg.router.callers import NOBODY, AccessError, Caller
from disagg.router.openai.errors import error_body
from disagg.router.openai.sse import to_json

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

RETRY_AFTER_S = b"1"


class BodyTooLargeError(RequestError):
    """The body exceeds the router's limit."""

    http_status = 413
    code = "request_too_large"


class LateBodyError(RequestError):
    """The body did not arrive in time."""

    http_status = 408
    code = "request_timeout"


class BodyBudget:
    """Bytes of request bodies held in memory, over all connections."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._used = 0

    def take(self, size: int) -> None:
        """Account for bytes about to be kept.

        Raises:
            CapacityError: there is no room; nothing was taken.
        """
        if self._used + size > self._bytes_max:
            raise CapacityError("too many large requests are being received")
        self._used += size

    def give_back(self, size: int) -> None:
        """Release the bytes of a body, which is no longer kept."""
        self._used -= size


class Exchange:
    """Reads a bounded body, writes one answer, notices when the client leaves.

    Attributes:
        caller: who it is; nobody until it has been looked at.
        request_id: echoed as ``x-request-id`` once it is set.
        started: the status line is on its way; errors can no longer change it.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        timeout_s: float,
        receive_timeout_s: float,
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.caller: Caller = NOBODY
        self.request_id = ""
        self.started = False
        self._receive = receive
        self._send = send
        self._timeout_s = timeout_s
        self._receive_timeout_s = receive_timeout_s

    async def body(self, bytes_max: int, budget: BodyBudget) -> bytes:
        """Read the whole body.

        Raises:
            BodyTooLargeError: it is larger than ``bytes_max``; at most that much was kept.
            CapacityError: all bodies together leave no room for it.
            LateBodyError: it did not go on, or took too long altogether.
            CancelledError: the client left before it was complete.
        """
        refusal = BodyTooLargeError(f"the body is larger than {bytes_max} bytes")
        declared = self.headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > bytes_max:
            raise refusal
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    async with asyncio.timeout(self._receive_timeout_s):
                        message = await self._receive()
                    if message["type"] != "http.request":
                        raise CancelledError("the client left while it sent the request")
                    chunk: bytes = message.get("body", b"")
                    if len(body) + len(chunk) > bytes_max:
                        raise refusal
                    budget.take(len(chunk))
                    body += chunk
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise LateBodyError("the request's body did not arrive in time") from None
        finally:
            budget.give_back(len(body))

    async def disconnected(self) -> None:
        """Return when the client has left; call only after `body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, content_type: bytes, extra: Iterable[Any] = ()) -> None:
        """Send the status line and headers."""
        headers: Headers = [(b"content-type", content_type), *extra]
        if self.request_id:
            headers.append((b"x-request-id", self.request_id.encode()))
        self.started = True
        await self._bounded({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body; waits while the client does not read.

        Raises:
            CancelledError: the client did not read for too long.
        """
        await self._bounded({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(
        self,
        status: int,
        data: bytes,
        content_type: bytes = b"application/json",
        extra: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Send a whole answer."""
        length = (b"content-length", str(len(data)).encode())
        await self.start(status, content_type, [length, *extra])
        await self.write(data, more=False)

    async def json(self, value: object, status: int = 200) -> None:
        """Send a JSON answer."""
        await self.answer(status, to_json(value))

    async def fail(self, error: DisaggError) -> None:
        """Send an error in the OpenAI schema; only before anything else was sent."""
        extra: Headers = []
        if error.http_status == 429:
            extra.append((b"retry-after", RETRY_AFTER_S))
        elif error.http_status == 408:
            extra.append((b"connection", b"close"))  # the rest of the body is no next request
        if isinstance(error, AccessError):
            extra.append((b"www-authenticate", error.challenge))
        data = to_json(error_body(error))
        await self.answer(error.http_status, data, extra=extra)

    async def _bounded(self, message: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            raise CancelledError("the client does not read its answer") from None
