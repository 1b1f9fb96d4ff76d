"""What operators see and change, on a port of its own; and a tenant its own records."""

import asyncio
import dataclasses
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from disagg.errors import RemoteFault, RequestError
from disagg.router.callers import ADMIN, Caller
from disagg.router.client_text import clip
from disagg.router.dispatch import Dispatcher
from disagg.router.drain_pages import DrainPages
from disagg.router.explanation import considered_body, estimate_body
from disagg.router.http_exchange import Exchange, Receive, Scope, Send
from disagg.router.http_site import NoRecordError, Page, Site
from disagg.router.keys import KeyRing
from disagg.router.live_pages import LivePages
from disagg.router.metrics import Metrics
from disagg.router.openai.errors import error_body
from disagg.router.openai.sse import to_json
from disagg.router.openapi import operations
from disagg.router.options import RouterOptions
from disagg.router.queue_pages import QueuePages
from disagg.router.revision_pages import RevisionPages
from disagg.router.siblings import Siblings
from disagg.router.status_pages import OBSERVERS, StatusPages
from disagg.routing.actions import CacheResetEnded
from disagg.routing.record import RequestRecord
from disagg.routing.worker_view import WorkerView

RECORDS = "/v1/disagg/requests/"
ID_PREFIXES = ("", "cmpl-", "chatcmpl-", "resp_")
"""Of the ids in answers, before the request's own."""


class AdminApp:
    """The live page, metrics, workers, revisions, records of requests, the reset of caches."""

    def __init__(
        self,
        options: RouterOptions,
        keys: KeyRing,
        dispatcher: Dispatcher,
        metrics: Metrics,
        siblings: Siblings | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._siblings = siblings
        self._metrics = metrics
        self._live = LivePages(options, keys, dispatcher)
        self._site = Site(
            "disagg: operators",
            options,
            keys,
            metrics,
            {
                ("GET", "/metrics"): Page(self._metrics_page, operations.METRICS, OBSERVERS),
                ("GET", "/v1/disagg/workers"): Page(self._workers, operations.WORKERS, OBSERVERS),
                ("POST", "/reset_prefix_cache"): Page(
                    self._reset, operations.RESET, frozenset((ADMIN,))
                ),
                **RevisionPages(options, dispatcher).pages,
                **DrainPages(options, dispatcher).pages,
                **StatusPages(options, dispatcher).pages,
                **self._live.pages,
                **QueuePages(dispatcher).pages,
            },
            {RECORDS: Page(self._record, operations.RECORD)},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        await self._site(scope, receive, send)

    def close(self) -> None:
        """End the streams of who looks on; everything else is still served."""
        self._live.close()

    async def _metrics_page(self, exchange: Exchange) -> None:
        content_type = b"text/plain; version=0.0.4; charset=utf-8"
        pieces: list[bytes] = []
        for piece in self._metrics.pieces():
            pieces.append(piece.encode())
            await asyncio.sleep(0)  # streams go on
        await exchange.answer(HTTPStatus.OK, b"".join(pieces), content_type)

    async def _workers(self, exchange: Exchange) -> None:
        now_ms = self._dispatcher.now_ms()
        workers = []
        for view in self._dispatcher.core.fleet:
            workers.append(worker_body(view, now_ms))
            await asyncio.sleep(0)  # each takes 0.1 ms; streams go on
        await exchange.json({"workers": workers})

    async def _record(self, exchange: Exchange) -> None:
        """GET /v1/disagg/requests/{id}: of the caller's tenant; of ?tenant=NAME for an admin.

        What another tenant has is looked for among the caller's own, where it is as unknown as
        what was never anywhere. Any process of a port says what one of them knows.
        """
        request_id = exchange.path.removeprefix(RECORDS)
        owner = record_owner(exchange)
        if found := await self._found(owner, request_id):
            await exchange.answer(HTTPStatus.OK, found)
            return
        shown = clip(request_id)
        if await self._found(owner, f"{request_id}-0"):
            raise NoRecordError(
                f"request {shown!r} has several choices, each with a record of its own: "
                f"{shown}-0, {shown}-1, …"
            )
        raise NoRecordError(f"no request {shown!r} is known, or it was too long ago")

    async def _found(self, owner: Caller, request_id: str) -> bytes:
        found = find_record(self._dispatcher, owner, request_id)
        if not found and self._siblings is not None:
            found = await self._siblings.find_record(owner.tenant, request_id)
        return found

    async def _reset(self, exchange: Exchange) -> None:
        """POST /reset_prefix_cache, as in vLLM: every worker forgets what it has cached.

        200 if all did; else 503, and what each worker made of it.
        """
        if exchange.query:
            raise RequestError("no parameters are known here", param="query")
        ended = await self._dispatcher.reset_prefix_caches()
        status = HTTPStatus.OK if ended.complete else HTTPStatus.SERVICE_UNAVAILABLE
        await exchange.json(reset_body(ended), status)


def find_record(dispatcher: Dispatcher, owner: Caller, request_id: str) -> bytes:
    """The JSON of ``/v1/disagg/requests/{id}``; b"" where this process knows no such request."""
    for prefix in ID_PREFIXES:
        record = dispatcher.core.record(owner.own_id(request_id.removeprefix(prefix)))
        if record is not None:
            return to_json(record_body(record, owner))
    return b""


def record_owner(exchange: Exchange) -> Caller:
    """Whose records are asked for: the caller's own, or for an admin those of ``?tenant=NAME``."""
    given = parse_qs(exchange.query.decode("latin-1"), keep_blank_values=True)
    if set(given) - {"tenant"}:
        raise RequestError("only tenant is known here", param="query")
    caller = exchange.caller
    if ADMIN not in caller.scopes:
        return caller
    return dataclasses.replace(caller, tenant=given.get("tenant", [caller.tenant])[-1])


def reset_body(ended: CacheResetEnded) -> dict[str, Any]:
    """The answer to a reset, per worker."""
    failed = [one for one in ended.workers if one.error]
    body: dict[str, Any] = {
        "success": ended.complete,
        "num_forgotten": sum(one.num_forgotten for one in ended.workers),
        "workers": [
            {
                "worker": one.worker._asdict(),
                "num_forgotten": one.num_forgotten,
                "in_use": dict(one.in_use),
                "error": one.error or None,
            }
            for one in ended.workers
        ],
    }
    if failed:
        told = "; ".join(f"{one.worker.worker_id} {one.error}" for one in failed)
        body |= error_body(RemoteFault(f"not every prefix cache was reset: {told}"))
    return body


def worker_body(view: WorkerView, now_ms: int) -> dict[str, Any]:
    """A worker for ``/v1/disagg/workers``."""
    body = dataclasses.asdict(view)
    body["info"]["incarnation"] = view.info.incarnation._asdict()
    body["heard_ms_ago"] = now_ms - body.pop("heard_ms")
    if view.stats is not None:
        body["stats"]["counters"] = dict(view.stats.counters)
        del body["stats"]["residency"]  # on /metrics, where histograms belong
    return body


def record_body(record: RequestRecord, owner: Caller) -> dict[str, Any]:
    """A request for ``/v1/disagg/requests/{id}``."""
    body = dataclasses.asdict(record)
    body["request_id"] = owner.shown_id(record.request_id)
    for shown, generation in zip(body["generations"], record.generations, strict=True):
        shown["prefill"] = generation.prefill._asdict()
        shown["decode"] = generation.decode._asdict()
        shown["local"] = generation.local
        shown["estimate"] = estimate_body(generation.estimate)
        shown["considered"] = [considered_body(one) for one in generation.considered]
        for name, transfer in (("transfer", generation.transfer), ("pull", generation.pull)):
            if transfer is not None:
                shown[name]["owner"] = transfer.owner._asdict()
                del shown[name]["key"]
    body["refused"] = [considered_body(one) for one in record.refused]
    body["cached_tokens"] = record.cached_tokens
    return body
