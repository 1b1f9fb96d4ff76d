"""One HTTP request and its answer, as uvicorn serves it and pages see it."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import (
    HEADER_VALUE_RE,
    STATUS_LINE,
    RequestResponseCycle,
)

from disagg.router.http_exchange import Headers


class ServerState(Protocol):
    """What connections know of their server.

    Attributes:
        is_leaving: every connection ends with its next answer.
    """

    is_leaving: bool


class Cycle(RequestResponseCycle):
    """One request and its answer: the `Connection` of an exchange.

    uvicorn's own `send` writes the head alone, and parts to clients that know none.
    """

    def __init__(self, state: ServerState, **given: Any) -> None:
        super().__init__(**given)
        self._state = state
        self._on_left: Callable[[], None] | None = None

    @property
    def has_left(self) -> bool:
        """See `Connection`."""
        return self.disconnected

    def on_left(self, call: Callable[[], None]) -> None:
        """See `Connection`."""
        self._on_left = call
        self.flow.resume_reading()  # a large body may have paused it: nobody would notice
        if self.disconnected:
            call()

    def lost(self) -> None:
        """The connection is no more."""
        if self.response_complete:
            return
        self.disconnected = True
        self.message_event.set()
        if self._on_left is not None:
            self._on_left()

    def cut_if_unread(self) -> None:
        """See `Connection`."""
        if self.flow.write_paused:
            self.transport.abort()

    async def taken(self) -> None:
        """See `Connection`."""
        if self.flow.write_paused:
            await self.flow.drain()

    def whole_body(self) -> bytes | None:
        """See `Connection`."""
        if self.more_body or self.disconnected:
            return None
        self.flow.resume_reading()
        body, self.body = bytes(self.body), bytearray()
        return body

    async def begin(self, status: int, headers: Headers, data: bytes, *, more: bool) -> None:
        """See `Connection`."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if self.waiting_for_100_continue and self.more_body and not self.body:
            self.keep_alive = False  # whether the body still comes is not known
        self.response_started, self.waiting_for_100_continue = True, False
        has_length = False
        lines = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            if HEADER_VALUE_RE.search(value):
                raise RuntimeError(f"the header {name!r} has a character that it cannot have")
            if name == b"content-length":
                has_length = True
            elif name == b"connection":  # there is one value for it
                self.keep_alive = False
                continue
            lines += (name, b": ", value, b"\r\n")
        scope = self.scope
        has_body = scope["method"] != "HEAD" and status != HTTPStatus.NO_CONTENT
        self.chunked_encoding = has_body and not has_length and scope["http_version"] == "1.1"
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        elif has_body and not has_length:
            self.keep_alive = False  # the body ends with the connection
        if self._state.is_leaving:
            self.keep_alive = False
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._write(b"".join(lines), data if has_body else b"", more=more)

    async def go_on(self, data: bytes, *, more: bool) -> None:
        """See `Connection`."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if not self.disconnected:
            self._write(b"", data if self.scope["method"] != "HEAD" else b"", more=more)

    def _write(self, head: bytes, data: bytes, *, more: bool) -> None:
        if self.chunked_encoding:
            part = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data = part if more else part + b"0\r\n\r\n"
        if head or data:
            self.transport.write(head + data)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def takes_chunks(self) -> bool:
        """See `Connection`."""
        return (
            self.chunked_encoding is True
            and not self.flow.write_paused
            and not self.disconnected
            and not self.response_complete
        )

    def write(self, data: bytes) -> None:
        """See `Connection`."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
