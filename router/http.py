"""The HTTP front: a raw ASGI application in OpenAI's shape."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, ClassVar

from disagg.errors import CancelledError, DisaggError, RequestError
from disagg.router.admin import AdminPages
from disagg.router.client_stream import ClientStream
from disagg.router.dispatch import Dispatcher
from disagg.router.http_exchange import BodyBudget, Exchange, Receive, Scope, Send
from disagg.router.metrics import Metrics
from disagg.router.openai.answer import Answer, Format
from disagg.router.openai.chat_format import ChatFormat
from disagg.router.openai.chat_request import ChatRequest, parse_chat
from disagg.router.openai.completion_format import CompletionFormat
from disagg.router.openai.completion_request import CompletionRequest, parse_completion
from disagg.router.openai.errors import error_body
from disagg.router.openai.sse import DONE, sse
from disagg.router.openai.usage import usage_body
from disagg.router.options import RouterOptions
from disagg.router.request_preparation import Preparation, clip, usable_as_request_id
from disagg.router.text_stream import Piece, pieces
from disagg.router.tokenizer import Tokenizer
from disagg.routing.fleet import WorkerView
from disagg.routing.record import RequestRecord

logger = logging.getLogger(__name__)

LARGEST_BODIES_MAX = 8
"""So many bodies of the largest size may be on their way at once."""
INLINE_BODY_BYTES_MAX = 64 << 10
"""Larger bodies are parsed in a thread."""

Handler = Callable[[Exchange], Awaitable[None]]
RequestBody = CompletionRequest | ChatRequest


class RouteError(RequestError):
    """No such path, or not with this method."""

    http_status: ClassVar[int] = 404
    code: ClassVar[str] = "not_found"


class MethodError(RequestError):
    """The path exists, the method does not."""

    http_status: ClassVar[int] = 405
    code: ClassVar[str] = "method_not_allowed"


class HttpApp:
    """Routes, generation endpoints and the pages about the router itself."""

    def __init__(
        self,
        options: RouterOptions,
        tokenizer: Tokenizer,
        dispatcher: Dispatcher,
        preparation: Preparation,
        metrics: Metrics,
    ) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._preparation = preparation
        self._metrics = metrics
        self._created = int(time.time())
        self._bodies = BodyBudget(LARGEST_BODIES_MAX * options.body_bytes_max)
        admin = AdminPages(dispatcher, options.admin_endpoints)
        self._routes: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/chat/completions"): self._chat,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._metrics_page,
            ("GET", "/v1/disagg/workers"): self._workers,
            ("POST", "/reset_prefix_cache"): admin.reset_prefix_cache,
        }
        self._prefixes: dict[str, Handler] = {
            "/v1/models/": self._model,
            "/v1/disagg/requests/": self._record,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            raise RuntimeError(f"ASGI scope {scope['type']} is not served")
        options = self._options
        bounds_s = (options.request_timeout_ms / 1000, options.receive_timeout_ms / 1000)
        exchange = Exchange(scope, receive, send, *bounds_s)
        try:
            await self._handler(exchange)(exchange)
        except CancelledError:
            pass  # nobody is there to read an answer
        except DisaggError as error:
            if not exchange.started:
                await exchange.fail(error)
            else:
                logger.warning("request %s: %s", exchange.request_id, error.message)
        except Exception:
            logger.exception("request %s: a bug of ours", exchange.request_id)
            if exchange.started:
                raise  # the server cuts the connection: an answer must not look complete
            await exchange.fail(DisaggError("internal error"))

    def _handler(self, exchange: Exchange) -> Handler:
        method = "GET" if exchange.method == "HEAD" else exchange.method
        handler = self._routes.get((method, exchange.path))
        if handler is not None:
            return handler
        allowed = [verb for verb, path in self._routes if path == exchange.path]
        for prefix, found in self._prefixes.items():
            if exchange.path.startswith(prefix):
                if method == "GET":
                    return found
                allowed = ["GET"]
        if allowed:
            raise MethodError(f"{clip(exchange.path)} takes {', '.join(allowed)}")
        raise RouteError(f"there is no {clip(exchange.path)}")

    # --- generation

    async def _completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, parse_completion, "cmpl-")

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, parse_chat, "chatcmpl-")

    async def _generate(
        self, exchange: Exchange, parse: Callable[[bytes], RequestBody], id_prefix: str
    ) -> None:
        try:
            body = await self._request_body(exchange, parse)
            left = asyncio.create_task(exchange.disconnected())
        except DisaggError as error:
            self._metrics.refused(error.code)
            raise
        try:
            try:
                request = await self._preparation.prepare(
                    body.generation_request(), exchange.request_id
                )
                if left.done():
                    raise CancelledError("the client left")
                stream = self._dispatcher.generate(request)
            except DisaggError as error:
                self._metrics.refused(error.code)
                raise
            exchange.request_id = request.request_id
            left.add_done_callback(lambda _: stream.cancel("client left"))
            try:
                await self._answer(exchange, body, stream, id_prefix)
            finally:
                stream.cancel("not answered")  # only if it still lives: the handler failed
        finally:
            left.cancel()

    async def _request_body(
        self, exchange: Exchange, parse: Callable[[bytes], RequestBody]
    ) -> RequestBody:
        given = exchange.headers.get(b"x-request-id", b"").decode("latin-1")
        if usable_as_request_id(given):  # else an own one: a proxy's id must not break its client
            exchange.request_id = given
        content_type = exchange.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if content_type != b"application/json":
            raise RequestError("must be application/json", param="content-type")
        data = await exchange.body(self._options.body_bytes_max, self._bodies)
        if len(data) <= INLINE_BODY_BYTES_MAX:
            return parse(data)
        return await asyncio.to_thread(parse, data)

    async def _answer(
        self, exchange: Exchange, body: RequestBody, stream: ClientStream, id_prefix: str
    ) -> None:
        answer = Answer(
            id_prefix + stream.request_id,
            int(time.time()),
            self._options.model_name,
            self._tokenizer,
            body.include_usage,
        )
        kind = CompletionFormat if isinstance(body, CompletionRequest) else ChatFormat
        shown: Format = kind(answer, stream.request.sampling.num_logprobs)
        async with aclosing(pieces(stream, self._tokenizer, body.stop)) as texts:
            if not body.stream:
                async for piece in texts:
                    shown.add(piece)
                await exchange.json(shown.body(self._usage(stream, answer)))
                return
            first = await anext(texts)  # until here an error still has its own status
            head = shown.first_chunk() + shown.chunk(first)
            await exchange.start(
                HTTPStatus.OK,
                b"text/event-stream; charset=utf-8",
                [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")],
            )
            await exchange.write(head)
            try:
                await self._rest(exchange, shown, texts)
            except CancelledError:
                raise
            except DisaggError as error:
                await exchange.write(sse(error_body(error)), more=False)
                return
        tail = shown.usage_chunk(self._usage(stream, answer)) if body.include_usage else b""
        await exchange.write(tail + DONE, more=False)

    async def _rest(self, exchange: Exchange, shown: Format, texts: Any) -> None:
        piece: Piece
        async for piece in texts:
            chunk = shown.chunk(piece)
            if chunk:
                await exchange.write(chunk)

    def _usage(self, stream: ClientStream, answer: Answer) -> dict[str, Any]:
        record = self._dispatcher.core.record(stream.request_id)
        num_prompt = len(stream.request.token_ids)
        cached = min(record.cached_tokens, num_prompt) if record is not None else 0
        return usage_body(num_prompt, answer.num_tokens, cached)

    # --- about the router

    async def _models(self, exchange: Exchange) -> None:
        await exchange.json({"object": "list", "data": [self._model_body()]})

    async def _model(self, exchange: Exchange) -> None:
        self._preparation.check_model(exchange.path.removeprefix("/v1/models/"))
        await exchange.json(self._model_body())

    def _model_body(self) -> dict[str, Any]:
        return {
            "id": self._options.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "disagg",
            "max_model_len": self._dispatcher.core.max_model_tokens or None,
        }

    async def _health(self, exchange: Exchange) -> None:
        await exchange.json(self._summary())

    async def _ready(self, exchange: Exchange) -> None:
        summary = self._summary()
        status = HTTPStatus.OK if summary["ready"] else HTTPStatus.SERVICE_UNAVAILABLE
        await exchange.json(summary, status)

    def _summary(self) -> dict[str, Any]:
        fleet = self._dispatcher.core.fleet
        return {
            "status": "stopping" if self._dispatcher.stopping else "ok",
            "ready": self._dispatcher.ready,
            "missing": self._dispatcher.missing_roles,
            "model": self._options.model_name,
            "num_workers": len(fleet),
            "num_workers_ready": sum(view.ready for view in fleet),
            "num_requests": self._dispatcher.core.num_live,
        }

    async def _metrics_page(self, exchange: Exchange) -> None:
        content_type = b"text/plain; version=0.0.4; charset=utf-8"
        await exchange.answer(HTTPStatus.OK, self._metrics.text(), content_type)

    async def _workers(self, exchange: Exchange) -> None:
        now_ms = self._dispatcher.now_ms()
        views = [worker_body(view, now_ms) for view in self._dispatcher.core.fleet]
        await exchange.json({"workers": views})

    async def _record(self, exchange: Exchange) -> None:
        request_id = exchange.path.removeprefix("/v1/disagg/requests/")
        for prefix in ("", "cmpl-", "chatcmpl-"):
            record = self._dispatcher.core.record(request_id.removeprefix(prefix))
            if record is not None:
                await exchange.json(record_body(record))
                return
        raise RouteError(f"no request {clip(request_id)!r} is known, or it was too long ago")


def worker_body(view: WorkerView, now_ms: int) -> dict[str, Any]:
    """A worker for ``/v1/disagg/workers``."""
    body = dataclasses.asdict(view)
    body["info"]["incarnation"] = view.info.incarnation._asdict()
    body["heard_ms_ago"] = now_ms - body.pop("heard_ms")
    if view.stats is not None:
        body["stats"]["counters"] = dict(view.stats.counters)
        del body["stats"]["residency"]  # on /metrics, where histograms belong
    return body


def record_body(record: RequestRecord) -> dict[str, Any]:
    """A request for ``/v1/disagg/requests/{id}``."""
    body = dataclasses.asdict(record)
    for shown, generation in zip(body["generations"], record.generations, strict=True):
        shown["prefill"] = generation.prefill._asdict()
        shown["decode"] = generation.decode._asdict()
        shown["local"] = generation.local
        for name, transfer in (("transfer", generation.transfer), ("pull", generation.pull)):
            if transfer is not None:
                shown[name]["owner"] = transfer.owner._asdict()
                del shown[name]["key"]
    body["cached_tokens"] = record.cached_tokens
    return body
