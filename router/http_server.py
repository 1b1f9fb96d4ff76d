"""uvicorn as the router needs it: no signals, connections of `http_connection`; its sockets."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from disagg.errors import ConfigError
from disagg.router.http_connection import protocol_of
from disagg.router.options import RouterOptions

STOP_TIMEOUT_S = 5
WAITING_CONNECTIONS_MAX = 2048
"""That the kernel keeps until they are accepted."""
ACCEPTS_AT_ONCE = 64
"""In a turn of the event loop; asyncio asks as often, and logs it each time, where no file is left.
"""
TURNS_TO_BEGIN = 10
"""Of the event loop: asyncio takes three from the accept of a connection to its beginning."""

KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Seconds without a word until the kernel asks whether a client is still there, then between two
questions, and how many. They also keep what translates addresses on the way from forgetting the
connection while a long answer is computed.
"""


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the process has one owner of signals.

    Attributes:
        is_leaving: from now on answers say that their connection is closed.
    """

    def __init__(self, app: Any, options: RouterOptions) -> None:
        self.is_leaving = False
        config = uvicorn.Config(
            app,
            http=protocol_of(options, self),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            backlog=ACCEPTS_AT_ONCE,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and log when connections are accepted."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(WAITING_CONNECTIONS_MAX)
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

    @property
    def has_unread(self) -> bool:
        """A client has not taken all of what was written to it."""
        return any(
            isinstance(one, HttpToolsProtocol) and one.flow.write_paused
            for one in self.server_state.connections
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the process has its own."""
        yield


def bind(
    setting: str,
    host: str,
    port: int,
    send_buffer_bytes: int,
    send_timeout_ms: int,
    *,
    is_shared: bool = False,
) -> socket.socket:
    """A socket for `HttpServer`, not listening yet.

    Args:
        setting: that gives the port, for the error.
        host: address to bind to.
        port: 0 for any free one.
        send_buffer_bytes: that the kernel keeps of what a client does not take.
        send_timeout_ms: after which a connection ends whose client says of nothing that it came.
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
    # Connections take these over. Else the kernel would keep megabytes for who reads nothing, and
    # ask after two hours whether one is there to which nothing is sent.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, send_buffer_bytes)
    # Of who has vanished: until the buffer is full nothing else would say so, and tokens are small.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, send_timeout_ms)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE:
        bound.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", param=setting) from error
    return bound
