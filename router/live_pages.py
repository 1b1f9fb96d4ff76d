"""The live page of the admin port, and what it shows: as JSON, once or as events."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files

from disagg.errors import CapacityError, RequestError
from disagg.router.callers import ADMIN, Caller, presented_key
from disagg.router.dispatch import Dispatcher
from disagg.router.http_exchange import Exchange, Headers
from disagg.router.http_site import Page
from disagg.router.keys import KeyRing
from disagg.router.openapi import operations
from disagg.router.options import RouterOptions
from disagg.router.overview import Overview
from disagg.router.status_pages import NO_KEY, OBSERVERS
from disagg.router.worker_statuses import LOOK_S, WorkerStatuses

EVERY_S = 1.0
FOLDER = "live"
FILES: Mapping[str, tuple[str, bytes]] = {
    "/": ("page.html", b"text/html; charset=utf-8"),
    "/live/page.css": ("page.css", b"text/css; charset=utf-8"),
    "/live/page.js": ("page.js", b"text/javascript; charset=utf-8"),
    "/live/block_maps.js": ("block_maps.js", b"text/javascript; charset=utf-8"),
    "/live/icon.svg": ("icon.svg", b"image/svg+xml"),
    "/live/request.js": ("request.js", b"text/javascript; charset=utf-8"),
}
"""By path: nothing else is served from the folder."""
GUARD: Headers = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
]
"""Whatever a name in the fleet may contain, the page runs its own files and calls this port."""


class LivePages:
    """``/``, ``/v1/disagg/status``, ``/v1/disagg/events``.

    The page's files need no key, as a browser has none yet: they say nothing of the fleet.

    Attributes:
        pages: for a site.
    """

    def __init__(self, options: RouterOptions, keys: KeyRing, dispatcher: Dispatcher) -> None:
        self._keys = keys
        self._overview = Overview(options.model_name, dispatcher)
        self._statuses = WorkerStatuses(lambda: tuple(dispatcher.sessions))
        self._observers_max = options.observers_max
        self._num_observers = 0
        self._made: dict[tuple[str, bool], tuple[float, asyncio.Task[bytes]]] = {}
        """What was made last and when, by a caller's tenant and whether it sees all of them."""
        self._closed = asyncio.Event()
        folder = files("disagg.router") / FOLDER
        self._files = {
            path: ((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()
        }
        self.pages = {
            ("GET", "/v1/disagg/status"): Page(self._status, operations.STATUS, OBSERVERS),
            ("GET", "/v1/disagg/events"): Page(self._events, operations.EVENTS, OBSERVERS),
            **{("GET", path): Page(self._file, None, NO_KEY) for path in FILES},
        }

    def close(self) -> None:
        """End all streams of events, so that a stop need not wait for who looks on."""
        self._closed.set()

    async def _file(self, exchange: Exchange) -> None:
        data, kind = self._files[exchange.path]
        await exchange.answer(200, data, kind, GUARD)

    async def _status(self, exchange: Exchange) -> None:
        if exchange.query:
            raise RequestError("no parameters are known here", param="query")
        answers = await self._statuses.look()
        await exchange.answer(200, await self._overview.json(exchange.caller, answers))

    async def _events(self, exchange: Exchange) -> None:
        """Send what `_status` answers every second, until the observer leaves or the router stops.

        Each event is whole. A slow observer is sent the next one when it has taken the last, so
        nothing piles up for it; one that takes nothing is cut off as every client is.
        """
        if exchange.query:
            raise RequestError("no parameters are known here", param="query")
        head = (HTTPStatus.OK, b"text/event-stream", [(b"cache-control", b"no-store")])
        if exchange.method == "HEAD":  # who asks for it follows nothing
            await exchange.start(*head, more=False)
            return
        if self._num_observers >= self._observers_max:
            bound = self._observers_max
            raise CapacityError(f"{bound} follow the events already (limits.observers_max)")
        self._num_observers += 1
        left = asyncio.Event()
        exchange.on_left(left.set)
        ends = [asyncio.create_task(end.wait()) for end in (left, self._closed)]
        try:
            await exchange.start(*head)
            while not any(end.done() for end in ends) and (caller := self._observer(exchange)):
                event = b"event: status\ndata: " + await self._shown(caller) + b"\n\n"
                await exchange.write(event)
                await asyncio.wait(ends, timeout=EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            await exchange.write(b"", more=False)
        finally:
            self._num_observers -= 1
            for end in ends:
                end.cancel()

    def _observer(self, exchange: Exchange) -> Caller | None:
        """Who has the key that opened the stream: it may be revoked meanwhile, or may less."""
        caller = self._keys.find(presented_key(exchange.headers))
        return caller if caller is not None and caller.scopes & OBSERVERS else None

    async def _shown(self, caller: Caller) -> bytes:
        """What those who may see the same are shown at the same moment, made once."""
        now_s = asyncio.get_running_loop().time()
        self._made = {
            who: one
            for who, one in self._made.items()
            if not one[1].done() or now_s - one[0] < LOOK_S
        }
        seen_by = (caller.tenant, ADMIN in caller.scopes)
        if seen_by not in self._made:
            self._made[seen_by] = now_s, asyncio.create_task(self._make(caller), name="live page")
        # Who leaves must not take along what others wait for.
        return await asyncio.shield(self._made[seen_by][1])

    async def _make(self, caller: Caller) -> bytes:
        return await self._overview.json(caller, await self._statuses.look())
