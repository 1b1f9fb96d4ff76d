"""The pages of one HTTP port: which one is asked for, by whom, and errors as answers."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar

from disagg.errors import CancelledError, DisaggError, RequestError
from disagg.router.callers import NOBODY, SCOPES, AccessError, presented_key
from disagg.router.client_text import clip
from disagg.router.connection_shares import ConnectionShares, HeldConnectionsError
from disagg.router.http_exchange import Exchange, Receive, Scope, Send
from disagg.router.keys import KeyRing
from disagg.router.metrics import Metrics
from disagg.router.openapi.document import Route, document_of
from disagg.router.openapi.operation import Operation
from disagg.router.openapi.operations import DOCUMENT
from disagg.router.options import RouterOptions

logger = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]


class RouteError(RequestError):
    """No such path, or not with this method."""

    http_status: ClassVar[int] = 404
    code: ClassVar[str] = "not_found"


class NoRecordError(RouteError):
    """The page is there, but no record of this request."""

    code: ClassVar[str] = "request_not_found"


class MethodError(RequestError):
    """The path exists, the method does not."""

    http_status: ClassVar[int] = 405
    code: ClassVar[str] = "method_not_allowed"


@dataclass(frozen=True, slots=True)
class Page:
    """What answers a path, and who may ask."""

    serve: Handler
    operation: Operation | None
    """What documents say of it; None: a file for browsers, which is in no document."""
    scopes: frozenset[str] = SCOPES
    """The caller's key needs one of them; none: no key is asked for."""


class Site:
    """An ASGI application; ``/openapi.json`` tells of its pages whoever has a key.

    Args:
        title: of the document.
        pages: by method and path.
        prefixes: of GET, by the beginning of their path.
    """

    def __init__(
        self,
        title: str,
        options: RouterOptions,
        keys: KeyRing,
        metrics: Metrics,
        pages: Mapping[tuple[str, str], Page],
        prefixes: Mapping[str, Page],
    ) -> None:
        self._options = options
        self._keys = keys
        self._metrics = metrics
        self._shares = ConnectionShares(options.connections_max)
        document = Page(self._document, DOCUMENT)
        self._pages = {**pages, ("GET", "/openapi.json"): document}
        self._prefixes = prefixes
        found = [*self._pages.items(), *((("GET", at), page) for at, page in prefixes.items())]
        routes = tuple(
            Route(method, path, page.operation, bool(page.scopes) and not keys.is_open)
            for (method, path), page in found
            if page.operation is not None
        )
        self._described = document_of(title, routes, options.model_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            raise RuntimeError(f"ASGI scope {scope['type']} is not served")
        exchange = Exchange(scope, receive, self._options)
        key = presented_key(exchange.headers)
        known = self._keys.find(key)
        exchange.caller = (known or NOBODY).at(exchange.address)
        try:
            with self._shares.held_by(exchange.caller):
                await self._serve(exchange, None if known else self._keys.refusal(key))
                await exchange.taken()
        except HeldConnectionsError as error:
            self._metrics.ended(error.code, exchange.caller.tenant)
            exchange.cut_if_unread()
            await exchange.fail(error)

    async def _serve(self, exchange: Exchange, refusal: AccessError | None) -> None:
        """Answer a request; ``refusal``: of a caller who is not known."""
        try:
            exchange.check_head()
            await self._admitted(exchange, refusal).serve(exchange)
        except CancelledError:
            pass  # nobody is there to read an answer
        except DisaggError as error:
            if isinstance(error, AccessError):
                self._metrics.ended(error.code, "")
            if not exchange.started:
                await exchange.fail(error)
            else:
                logger.warning(
                    "request %s: %s", exchange.request_id, error.message, extra=_fields(exchange)
                )
        except Exception:
            logger.exception(
                "request %s: a bug of ours", exchange.request_id, extra=_fields(exchange)
            )
            if exchange.started:
                raise  # the server cuts the connection: an answer must not look complete
            await exchange.fail(DisaggError("internal error"))

    async def _document(self, exchange: Exchange) -> None:
        await exchange.answer(HTTPStatus.OK, self._described)

    def _admitted(self, exchange: Exchange, refusal: AccessError | None) -> Page:
        """The page, if its caller is known and may see it. Strangers learn of no page."""
        page = self._page(exchange)
        if page is not None and not page.scopes:
            return page
        if refusal is not None:
            raise refusal
        if page is None:
            raise self._missing(exchange)
        exchange.caller.check(page.scopes)
        return page

    def _page(self, exchange: Exchange) -> Page | None:
        method = "GET" if exchange.method == "HEAD" else exchange.method
        page = self._pages.get((method, exchange.path))
        for prefix, found in self._prefixes.items():
            if page is None and method == "GET" and exchange.path.startswith(prefix):
                page = found
        return page

    def _missing(self, exchange: Exchange) -> RequestError:
        path = exchange.path
        allowed = [verb for verb, known in self._pages if known == path]
        if any(path.startswith(prefix) for prefix in self._prefixes):
            allowed = ["GET"]
        if allowed:
            return MethodError(f"{clip(path)} takes {', '.join(allowed)}")
        return RouteError(f"there is no {clip(path)}")


def _fields(exchange: Exchange) -> dict[str, str]:
    """What a line in the log names of an exchange."""
    return {"request_id": exchange.request_id, "tenant": exchange.caller.tenant}
