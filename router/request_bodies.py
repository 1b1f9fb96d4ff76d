"""Bodies of HTTP requests: read within bounds, then parsed."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from disagg.errors import RequestError
from disagg.router.client_text import usable_as_request_id
from disagg.router.fair_threads import FairThreads
from disagg.router.http_exchange import BodyBudget, Exchange
from disagg.router.options import RouterOptions

LARGEST_BODIES_MAX = 8
"""So many bodies of the largest size are room for those on their way; see `BodyBudget`."""
INLINE_BODY_BYTES_MAX = 64 << 10
"""Larger bodies are parsed in a thread, where there is one."""

_Body = TypeVar("_Body")


class RequestBodies:
    """The JSON bodies of all connections, which share one budget of memory until they are parsed.

    Args:
        options: bounds.
        threads: where large ones are parsed by turns; None: they are not expected.
    """

    def __init__(self, options: RouterOptions, threads: FairThreads | None = None) -> None:
        self._threads = threads
        self._budget = BodyBudget(LARGEST_BODIES_MAX * options.body_bytes_max)

    async def read(self, exchange: Exchange, parse: Callable[[bytes], _Body]) -> _Body:
        """Read and parse a body, and take the client's request id if it gave a usable one.

        Raises:
            DisaggError: it did not come, is too large, or is no request; or too many wait.
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
        size, tenant = len(data), exchange.caller.tenant
        if self._threads is None or size <= INLINE_BODY_BYTES_MAX:
            return parse(data)
        self._budget.take(tenant, size)
        try:
            return await self._threads.run(tenant, size, partial(parse, data))
        finally:
            self._budget.give_back(tenant, size)
