"""Bodies of HTTP requests: read within bounds, then parsed."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from disagg.errors import RequestError
from disagg.router.client_text import usable_as_request_id
from disagg.router.http_exchange import BodyBudget, Exchange
from disagg.router.options import RouterOptions

LARGEST_BODIES_MAX = 8
"""So many bodies of the largest size are room for those on their way; see `BodyBudget`."""
INLINE_BODY_BYTES_MAX = 64 << 10
"""Larger bodies are parsed in a thread."""

_Body = TypeVar("_Body")


class RequestBodies:
    """The JSON bodies of all connections, which share one budget of memory."""

    def __init__(self, options: RouterOptions) -> None:
        self._budget = BodyBudget(LARGEST_BODIES_MAX * options.body_bytes_max)

    async def read(self, exchange: Exchange, parse: Callable[[bytes], _Body]) -> _Body:
        """Read and parse a body, and take the client's request id if it gave a usable one.

        Raises:
            DisaggError: it did not come, is too large, or is no request.
        """
        given = exchange.headers.get(b"x-request-id", b"").decode("latin-1")
        if usable_as_request_id(given):  # else an own one: a proxy's id must not break its client
            exchange.request_id = given
        content_type = exchange.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if content_type != b"application/json":
            raise RequestError("must be application/json", param="content-type")
        if exchange.headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise RequestError("no coding but identity is taken", param="content-encoding")
        data = await exchange.body(self._budget)
        if len(data) <= INLINE_BODY_BYTES_MAX:
            return parse(data)
        return await asyncio.to_thread(parse, data)
