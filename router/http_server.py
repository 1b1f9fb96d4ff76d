"""uvicorn as the router needs it: no signals; bounds on connections, heads and slow readers."""

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from disagg.errors import CapacityError, ConfigError, DisaggError, RequestError
from disagg.router.http_exchange import CONNECTION, HeadTooLargeError
from disagg.router.openai.errors import error_body
from disagg.router.openai.sse import to_json
from disagg.router.options import RouterOptions
from disagg.router.patience import Patience

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5
TURNS_TO_BEGIN = 10
"""Of the event loop: asyncio takes three from the accept of a connection to its beginning."""


class TooManyConnectionsError(CapacityError):
    """The router has as many connections as it takes."""

    http_status = 503
    code = "too_many_connections"


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the process has one owner of signals."""

    def __init__(self, app: Any, options: RouterOptions) -> None:
        config = uvicorn.Config(
            app,
            http=_protocol(options),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            h11_max_incomplete_event_size=options.header_bytes_max,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and log when connections are accepted."""
        await super().startup(sockets)
        self.is_up.set()

    async def stop_listening(self) -> None:
        """Accept no further connection; those there are go on."""
        loop = asyncio.get_running_loop()
        for server in self.servers:
            for listening in server.sockets:
                loop.remove_reader(listening.fileno())
        # asyncio resets what it has accepted, and has not begun with, when the server is closed.
        for _ in range(TURNS_TO_BEGIN):
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()

    @property
    def num_connections(self) -> int:
        """Connections of clients."""
        return len(self.server_state.connections)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the process has its own."""
        yield


class _CycleConnection:
    """The way to and from the client of one request.

    Parts of a body are written without a pass through h11, which does no more.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        scope = cycle.scope
        self._has_chunks = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
        self._on_left: Callable[[], None] | None = None

    @property
    def has_left(self) -> bool:
        """See `Connection`."""
        return self._cycle.disconnected

    def on_left(self, call: Callable[[], None]) -> None:
        """See `Connection`."""
        self._on_left = call
        self._cycle.flow.resume_reading()  # a large body may have paused it: nobody would notice
        if self.has_left:
            call()

    def left(self) -> None:
        """The connection was lost."""
        if self.has_left and self._on_left is not None:
            self._on_left()

    def takes_chunks(self) -> bool:
        """See `Connection`."""
        cycle = self._cycle
        return (
            self._has_chunks
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and cycle.response_started
            and not cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        """See `Connection`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _protocol(options: RouterOptions) -> type[H11Protocol]:
    class BoundedProtocol(H11Protocol):
        """Closes connections whose client sends no whole head, or does not take its answer.

        uvicorn's timer of idle connections begins after an answer and stops at any byte. Here it
        also begins with the connection, and only a whole head stops it. Writing pauses as soon as
        the kernel takes no more, so while it is paused what is left only shrinks as the client
        reads: if it does not, the connection is cut, whoever waits for it and whatever was sent.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.timeout_keep_alive = options.receive_timeout_ms / 1000  # type: ignore[assignment]
            self._unsent_timer: asyncio.TimerHandle | None = None
            self._served, self.app = self.app, self._serve

        async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
            scope[CONNECTION] = _CycleConnection(self.cycle)
            await self._served(scope, receive, send)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)
            if len(self.connections) > options.connections_max:
                refusal = TooManyConnectionsError(
                    f"there are {options.connections_max} connections (limits.connections_max)",
                    retry_after_s=1,
                )
                transport.write(_raw_answer(refusal))
                transport.close()
                return
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

        def data_received(self, data: bytes) -> None:
            self.conn.receive_data(data)
            self.handle_events()  # stops the timer at a whole head

        def send_400_response(self, msg: str) -> None:
            fault = sys.exc_info()[1]  # called where it was caught
            if self.conn.our_state.__name__ in ("IDLE", "SEND_RESPONSE"):  # else one has begun
                self.transport.write(_raw_answer(_head_error(fault, options)))
            self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            patience = Patience(
                self.loop.time(), options.send_timeout_ms / 1000, options.send_bytes_per_s_min
            )
            self._unsent_timer = self.loop.call_later(
                patience.left_s(self.loop.time()),
                self._check_unsent,
                patience,
                self.transport.get_write_buffer_size(),
            )

        def resume_writing(self) -> None:
            self._stop_unsent_timer()
            super().resume_writing()

        def _check_unsent(self, patience: Patience, num_unsent: int) -> None:
            left = self.transport.get_write_buffer_size()
            # More than before: the end of the same answer was written behind it.
            patience.moved(self.loop.time(), max(0, num_unsent - left))
            wait_s = patience.left_s(self.loop.time())
            if wait_s > 0:
                self._unsent_timer = self.loop.call_later(
                    wait_s, self._check_unsent, patience, left
                )
                return
            logger.warning("%s does not read its answer: it is cut off", self.client)
            self.transport.abort()

        def _stop_unsent_timer(self) -> None:
            if self._unsent_timer is not None:
                self._unsent_timer.cancel()
                self._unsent_timer = None

        def connection_lost(self, exc: Exception | None) -> None:
            self._unset_keepalive_if_required()
            self._stop_unsent_timer()
            super().connection_lost(exc)
            connection = self.cycle.scope.get(CONNECTION) if self.cycle is not None else None
            if isinstance(connection, _CycleConnection):
                connection.left()

    return BoundedProtocol


def _head_error(fault: BaseException | None, options: RouterOptions) -> DisaggError:
    if getattr(fault, "error_status_hint", 400) == HeadTooLargeError.http_status:
        return HeadTooLargeError(
            f"the request line and headers have more than {options.header_bytes_max} bytes "
            "(limits.header_bytes_max)"
        )
    return RequestError("this is not HTTP/1.1 as it should be")


def _raw_answer(error: DisaggError) -> bytes:
    """A whole answer for a connection that has no request, and is closed after it."""
    data = to_json(error_body(error))
    phrase = HTTPStatus(error.http_status).phrase
    retry = f"retry-after: {error.retry_after_s}\r\n" if error.retry_after_s else ""
    head = (
        f"HTTP/1.1 {error.http_status} {phrase}\r\n{retry}"
        "content-type: application/json\r\n"
        f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + data


def bind(
    setting: str, host: str, port: int, send_buffer_bytes: int, *, is_shared: bool = False
) -> socket.socket:
    """A socket for `HttpServer`, not listening yet.

    Args:
        setting: that gives the port, for the error.
        host: address to bind to.
        port: 0 for any free one.
        send_buffer_bytes: that the kernel keeps of what a client does not take.
        is_shared: other sockets of this user may listen on the port too; the kernel spreads
            connections over those that do.

    Raises:
        ConfigError: the port is taken or the host is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that say IPPROTO_TCP; without it every answer of
    # two writes (headers, body) waits 40 ms for the client's delayed ACK.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Connections take it over. Else the kernel would keep megabytes for who reads nothing.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, send_buffer_bytes)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", param=setting) from error
    return bound
