"""uvicorn as the router needs it: no signals; bounds on connections and on waiting for a head."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from disagg.errors import ConfigError
from disagg.router.options import RouterOptions

STOP_TIMEOUT_S = 5
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"connection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
)


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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the process has its own."""
        yield


def _protocol(options: RouterOptions) -> type[H11Protocol]:
    class BoundedProtocol(H11Protocol):
        """Closes a connection without a whole request head for ``receive_timeout_ms``.

        uvicorn's timer of idle connections begins after an answer and stops at any byte. Here it
        also begins with the connection, and only a whole head stops it.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.timeout_keep_alive = options.receive_timeout_ms / 1000  # type: ignore[assignment]

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > options.connections_max:
                transport.write(REFUSAL)
                transport.close()
                return
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

        def data_received(self, data: bytes) -> None:
            self.conn.receive_data(data)
            self.handle_events()  # stops the timer at a whole head

        def connection_lost(self, exc: Exception | None) -> None:
            self._unset_keepalive_if_required()
            super().connection_lost(exc)

    return BoundedProtocol


def bind(setting: str, host: str, port: int) -> socket.socket:
    """A socket for `HttpServer`, not listening yet.

    Args:
        setting: that gives the port, for the error.
        host: address to bind to.
        port: 0 for any free one.

    Raises:
        ConfigError: the port is taken or the host is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that say IPPROTO_TCP; without it every answer of
    # two writes (headers, body) waits 40 ms for the client's delayed ACK.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", param=setting) from error
    return bound
