"""One HTTP request and its answer over raw ASGI."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

from disagg.errors import (
    CancelledError,
    CapacityError,
    DisaggError,
    RequestError,
    SloError,
    StoppingError,
    SupersededError,
)
from disagg.router.callers import NOBODY, AccessError, Caller
from disagg.router.connection_shares import HeldConnectionsError
from disagg.router.openai.errors import error_body
from disagg.router.openai.sse import to_json
from disagg.router.options import RouterOptions
from disagg.router.patience import Patience

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

CONNECTION = "disagg.connection"
"""In a request's scope: `Connection`."""
MORE_HEADERS = "disagg.more_headers"
"""There too, if anything: headers that its answer has in any case."""

RETRY_AFTER_S = {429: 1, 503: 5}
"""Where nothing better is known: a place is free soon, a worker is back within its heartbeats."""


class HeadTooLargeError(RequestError):
    """The request line and headers exceed the router's limits."""

    http_status = 431
    code = "request_header_fields_too_large"


class BodyTooLargeError(RequestError):
    """The body exceeds the router's limit."""

    http_status = 413
    code = "request_too_large"


class LateBodyError(RequestError):
    """The body did not arrive in time."""

    http_status = 408
    code = "request_timeout"


class Connection(Protocol):
    """The way to and from the client of one request: what ASGI has only at a higher price.

    Attributes:
        has_left: the client has, before its answer was complete.
    """

    @property
    def has_left(self) -> bool:
        """Whether it has."""

    def on_left(self, call: Callable[[], None]) -> None:
        """Let this be called when the client leaves before its answer is complete."""

    def cut_if_unread(self) -> None:
        """Cut the client off if it has not taken what was written to it before."""

    async def taken(self) -> None:
        """Wait until the client has taken what was written, or was cut off."""

    def whole_body(self) -> bytes | None:
        """The body, if all of it has come already."""

    async def begin(self, status: int, headers: Headers, data: bytes, *, more: bool) -> None:
        """Write the head together with the first part of the body, or all of it.

        Waits, as `go_on` does, while the client does not read. ``connection`` among the headers
        means that it is closed.
        """

    async def go_on(self, data: bytes, *, more: bool) -> None:
        """Write a part of the body."""

    def takes_chunks(self) -> bool:
        """Whether the answer is one in chunks, and all that was written has left."""

    def write(self, data: bytes) -> None:
        """Write a part, which is not empty."""


class BodyBudget:
    """Bytes of request bodies that are on their way, over all connections.

    A tenant may have `SHARE` times what it leaves to others: they find some room, however much is
    sent, and however slowly, by one that has taken all it can get.
    """

    SHARE = 3

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._used: Counter[str] = Counter()

    def take(self, tenant: str, size: int) -> None:
        """Account for bytes about to be kept.

        Raises:
            CapacityError: there is no room; nothing was taken.
        """
        left = self._bytes_max - self._used.total() - size
        if self._used[tenant] + size > self.SHARE * left:
            raise CapacityError("too many large requests are being received")
        self._used[tenant] += size

    def give_back(self, tenant: str, size: int) -> None:
        """Release the bytes of a body, which is no longer kept."""
        self._used[tenant] -= size
        if not self._used[tenant]:
            del self._used[tenant]


class Exchange:
    """Reads a bounded body, writes one answer, notices when the client leaves.

    Attributes:
        address: where the client is; "" if it is not known.
        caller: who it is; nobody until it has been looked at.
        request_id: echoed as ``x-request-id`` once it is set.
        more_headers: of an answer that has not started.
        started: the status line is on its way; errors can no longer change it.
    """

    def __init__(self, scope: Scope, receive: Receive, options: RouterOptions) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.address: str = (scope.get("client") or ("",))[0]
        self.query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.caller: Caller = NOBODY
        self.request_id = ""
        self.more_headers: Headers = [*scope.get(MORE_HEADERS, ())]
        self.started = False
        self._receive = receive
        self._options = options
        # Out of the scope, which it refers to: else only the garbage collector would free both.
        self._connection: Connection = scope.pop(CONNECTION)
        self._num_headers = len(scope["headers"])
        fields = sum(len(name) + len(value) for name, value in scope["headers"])
        self._head_bytes = fields + len(scope["raw_path"]) + len(self.query)

    def check_head(self) -> None:
        """Refuse a head that is too large.

        Raises:
            HeadTooLargeError: naming the setting.
        """
        options = self._options
        if self._head_bytes > options.header_bytes_max:
            raise HeadTooLargeError(
                f"the request line and headers have {self._head_bytes} bytes, at most "
                f"{options.header_bytes_max} are taken (limits.header_bytes_max)"
            )
        if self._num_headers > options.headers_max:
            raise HeadTooLargeError(
                f"there are more than {options.headers_max} headers (limits.headers_max)"
            )

    async def body(self, budget: BodyBudget) -> bytes:
        """Read the whole body.

        Raises:
            BodyTooLargeError: it is larger than the limit; at most that much was kept.
            CapacityError: all bodies on their way together leave no room for it.
            LateBodyError: it did not go on, or came too slowly.
            CancelledError: the client left before it was complete.
        """
        options, bytes_max = self._options, self._options.body_bytes_max
        declared = self.headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > bytes_max:
            raise _too_large(bytes_max)
        if (whole := self._connection.whole_body()) is not None:  # as that of most requests
            if len(whole) > bytes_max:
                raise _too_large(bytes_max)
            return whole
        body, tenant = bytearray(), self.caller.tenant
        timeout_s, rate = options.receive_timeout_ms / 1000, options.receive_bytes_per_s_min
        patience = Patience(time.monotonic(), timeout_s, rate)
        try:
            while True:
                async with asyncio.timeout(patience.left_s(time.monotonic())):
                    message = await self._receive()
                if message["type"] != "http.request":
                    raise CancelledError("the client left while it sent the request")
                chunk: bytes = message.get("body", b"")
                patience.moved(time.monotonic(), len(chunk))
                if len(body) + len(chunk) > bytes_max:
                    raise _too_large(bytes_max)
                budget.take(tenant, len(chunk))
                body += chunk
                if not message.get("more_body", False):
                    return bytes(body)
        except TimeoutError:
            raise LateBodyError(
                f"the request's body stood still for {timeout_s:g} s or came at less than {rate} "
                "bytes/s (limits.receive_timeout_ms, limits.receive_bytes_per_s_min)"
            ) from None
        finally:
            budget.give_back(tenant, len(body))

    @property
    def has_left(self) -> bool:
        """The client has, before its answer was complete."""
        return self._connection.has_left

    def on_left(self, call: Callable[[], None]) -> None:
        """Let this be called if the client leaves before its answer is complete; after `body`."""
        self._connection.on_left(call)

    async def start(
        self,
        status: int,
        content_type: bytes,
        extra: Iterable[tuple[bytes, bytes]] = (),
        data: bytes = b"",
        *,
        more: bool = True,
    ) -> None:
        """Send the status line, headers and a first part; who is to come again is told when."""
        headers: Headers = [(b"content-type", content_type), *extra, *self.more_headers]
        said = any(name in (b"retry-after", b"x-should-retry") for name, _ in headers)
        if status in RETRY_AFTER_S and not said:
            headers.append((b"retry-after", str(RETRY_AFTER_S[status]).encode()))
        if self.request_id:
            headers.append((b"x-request-id", self.request_id.encode()))
        self.started = True
        await self._connection.begin(status, headers, data, more=more)

    def cut_if_unread(self) -> None:
        """See `Connection`."""
        self._connection.cut_if_unread()

    async def taken(self) -> None:
        """See `Connection`."""
        await self._connection.taken()

    def is_writable(self) -> bool:
        """Whether a part of a body that has no length would leave at once by `write_now`."""
        return self._connection.takes_chunks()

    def write_now(self, data: bytes) -> None:
        """Send such a part without waiting; only while `is_writable`."""
        self._connection.write(data)

    async def stream(self, data: bytes) -> None:
        """Send such a part, as `write` does: the usual case is faster."""
        if self.is_writable():
            self.write_now(data)
        else:
            await self.write(data)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body; waits while the client does not read, which the server bounds.

        Once the client has left, or was cut off, nothing is sent any more.
        """
        await self._connection.go_on(data, more=more)

    async def answer(
        self,
        status: int,
        data: bytes,
        content_type: bytes = b"application/json",
        extra: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Send a whole answer."""
        length = (b"content-length", str(len(data)).encode())
        await self.start(status, content_type, [length, *extra], data, more=False)

    async def json(self, value: object, status: int = 200) -> None:
        """Send a JSON answer."""
        await self.answer(status, to_json(value))

    async def fail(self, error: DisaggError) -> None:
        """Send an error in the OpenAI schema; only before anything else was sent."""
        extra: Headers = []
        if error.retry_after_s:
            extra.append((b"retry-after", str(error.retry_after_s).encode()))
        if error.http_status == 408 or isinstance(error, (StoppingError, HeldConnectionsError)):
            # The rest of the body is no next request; or the next one is for another replica; or
            # others need the connection.
            extra.append((b"connection", b"close"))
        if isinstance(error, SupersededError) or (
            isinstance(error, SloError) and not error.retry_after_s
        ):
            # openai's client sends again after 409, and would end what is served in its place; and
            # after 429, where it would be as late again.
            extra.append((b"x-should-retry", b"false"))
        if isinstance(error, AccessError):
            extra.append((b"www-authenticate", error.challenge))
        data = to_json(error_body(error))
        await self.answer(error.http_status, data, extra=extra)


def _too_large(bytes_max: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is larger than {bytes_max} bytes (limits.body_bytes_max)")
