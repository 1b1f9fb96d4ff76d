"""Cross-origin requests (CORS): which web pages may call the router from a browser."""

import re
from collections.abc import Awaitable, Callable
from http import HTTPMethod, HTTPStatus

from disagg.router.http_exchange import (
    CONNECTION,
    MORE_HEADERS,
    Connection,
    Headers,
    Receive,
    Scope,
    Send,
)
from disagg.router.options import ANY_ORIGIN

App = Callable[[Scope, Receive, Send], Awaitable[None]]
HEADER = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")
METHODS = b"GET, HEAD, POST"
REQUEST_HEADERS = (b"authorization", b"content-type", b"x-api-key", b"x-request-id")
"""What pages may send; also what else they ask for, as OpenAI's client for browsers does. A key is
no cookie: a browser adds none by itself, so headers give a page no right that it has not got."""
EXPOSED_HEADERS = b"Retry-After, WWW-Authenticate, X-Request-Id"
"""What pages may read of an answer, besides what browsers always let them."""
MAX_AGE_S = 600
"""So long browsers remember what a preflight was answered."""


class CrossOrigin:
    """An ASGI application that lets pages of some origins call another one.

    It answers preflights itself, the same for every path and without a key: they have none. To all
    other answers, errors and streams included, it adds the headers.

    Args:
        app: whose answers they are.
        origins: that may read them; ``("*",)``: all.
    """

    def __init__(self, app: App, origins: tuple[str, ...]) -> None:
        self._app = app
        self._any = ANY_ORIGIN in origins
        self._origins = frozenset(origin.encode() for origin in origins)
        # What a cache keeps for one origin must not be given to another.
        self._vary: Headers = [] if self._any else [(b"vary", b"Origin")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        allowed = self._allowed(headers.get(b"origin"))
        is_preflight = (
            scope.get("method") == HTTPMethod.OPTIONS
            and b"access-control-request-method" in headers
        )
        if allowed and is_preflight:
            asked = headers.get(b"access-control-request-headers", b"")
            told = [*allowed, *self._vary, *_preflight_headers(asked)]
            connection: Connection = scope[CONNECTION]
            await connection.begin(HTTPStatus.NO_CONTENT, told, b"", more=False)
            return
        shown = [(b"access-control-expose-headers", EXPOSED_HEADERS)] if allowed else []
        scope[MORE_HEADERS] = [*allowed, *self._vary, *shown]
        await self._app(scope, receive, send)

    def _allowed(self, origin: bytes | None) -> Headers:
        """Tells the browser that pages of this origin may read the answer; empty: they may not."""
        if self._any:
            origin = ANY_ORIGIN.encode()
        elif origin not in self._origins:
            return []
        return [(b"access-control-allow-origin", origin or b"")]


def _preflight_headers(asked: bytes) -> Headers:
    """What an allowed page may do."""
    names = [name.strip().lower() for name in asked.split(b",")]
    more = [name for name in names if name not in REQUEST_HEADERS and HEADER.fullmatch(name)]
    return [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", b", ".join((*REQUEST_HEADERS, *dict.fromkeys(more)))),
        (b"access-control-max-age", b"%d" % MAX_AGE_S),
        (b"vary", b"Access-Control-Request-Headers"),
    ]
