"""The HTTP front: a raw ASGI application in OpenAI's shape."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar

from disagg.errors import CancelledError, DisaggError, RequestError
from disagg.router.callers import SERVE
from disagg.router.client_stream import ClientStream
from disagg.router.dispatch import Dispatcher
from disagg.router.http_exchange import BodyBudget, Exchange, Receive, Scope, Send
from disagg.router.http_site import Page, Site
from disagg.router.keys import KeyRing
from disagg.router.metrics import Metrics
from disagg.router.open_streams import OpenStreams
from disagg.router.openai.answer import Answer, Format
from disagg.router.openai.chat_format import ChatFormat
from disagg.router.openai.chat_request import ChatRequest, parse_chat
from disagg.router.openai.completion_format import CompletionFormat
from disagg.router.openai.completion_request import CompletionRequest, parse_completion
from disagg.router.openai.message_fields import MessageFields
from disagg.router.openai.responses_format import ResponsesFormat
from disagg.router.openai.responses_request import ResponsesRequest, parse_responses
from disagg.router.openai.usage import usage_body
from disagg.router.options import RouterOptions
from disagg.router.request_preparation import Preparation, usable_as_request_id
from disagg.router.status_pages import StatusPages
from disagg.router.text_stream import Piece, pieces
from disagg.router.token_pages import TokenPages
from disagg.router.tokenizer import Tokenizer

LARGEST_BODIES_MAX = 8
"""So many bodies of the largest size may be on their way at once."""
INLINE_BODY_BYTES_MAX = 64 << 10
"""Larger bodies are parsed in a thread."""

RequestBody = CompletionRequest | ChatRequest | ResponsesRequest
_Body = TypeVar("_Body")


class HttpApp:
    """What clients ask for."""

    def __init__(
        self,
        options: RouterOptions,
        keys: KeyRing,
        tokenizer: Tokenizer,
        dispatcher: Dispatcher,
        preparation: Preparation,
        metrics: Metrics,
        streams: OpenStreams,
    ) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._preparation = preparation
        self._metrics = metrics
        self._created = int(time.time())
        self._streams = streams
        self._bodies = BodyBudget(LARGEST_BODIES_MAX * options.body_bytes_max)
        tokens = TokenPages(tokenizer, preparation, dispatcher, self._request_body)
        status = StatusPages(options, dispatcher)
        serve = frozenset((SERVE,))
        self._site = Site(
            options,
            keys,
            metrics,
            {
                ("POST", "/v1/completions"): Page(self._completions, serve),
                ("POST", "/v1/chat/completions"): Page(self._chat, serve),
                ("POST", "/v1/responses"): Page(self._responses, serve),
                ("POST", "/tokenize"): Page(tokens.tokenize, serve),
                ("POST", "/detokenize"): Page(tokens.detokenize, serve),
                ("GET", "/v1/models"): Page(self._models, serve),
                **status.pages,
            },
            {"/v1/models/": Page(self._model, serve)},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        await self._site(scope, receive, send)

    # --- generation

    async def _completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, parse_completion, "cmpl-")

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, parse_chat, "chatcmpl-")

    async def _responses(self, exchange: Exchange) -> None:
        await self._generate(exchange, parse_responses, "resp_")

    async def _generate(
        self, exchange: Exchange, parse: Callable[[bytes], RequestBody], id_prefix: str
    ) -> None:
        caller = exchange.caller
        try:
            counted = self._streams.open(caller)
        except DisaggError as error:
            self._metrics.refused(error.code, caller.tenant)
            raise
        with counted:
            await self._serve(exchange, parse, id_prefix)

    async def _serve(
        self, exchange: Exchange, parse: Callable[[bytes], RequestBody], id_prefix: str
    ) -> None:
        caller = exchange.caller
        try:
            body = await self._request_body(exchange, parse)
            left = asyncio.create_task(exchange.disconnected())
        except DisaggError as error:
            self._metrics.refused(error.code, caller.tenant)
            raise
        try:
            try:
                request = await self._preparation.prepare(
                    body.generation_request(), exchange.request_id, caller
                )
                if left.done():
                    raise CancelledError("the client left")
                stream = self._dispatcher.generate(request)
            except DisaggError as error:
                self._metrics.refused(error.code, caller.tenant)
                raise
            exchange.request_id = caller.shown_id(request.request_id)
            left.add_done_callback(lambda _: stream.cancel("client left"))
            try:
                await self._answer(exchange, body, stream, id_prefix)
            finally:
                stream.cancel("not answered")  # only if it still lives: the handler failed
        finally:
            left.cancel()

    async def _request_body(self, exchange: Exchange, parse: Callable[[bytes], _Body]) -> _Body:
        given = exchange.headers.get(b"x-request-id", b"").decode("latin-1")
        if usable_as_request_id(given):  # else an own one: a proxy's id must not break its client
            exchange.request_id = given
        content_type = exchange.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if content_type != b"application/json":
            raise RequestError("must be application/json", param="content-type")
        data = await exchange.body(self._bodies)
        if len(data) <= INLINE_BODY_BYTES_MAX:
            return parse(data)
        return await asyncio.to_thread(parse, data)

    async def _answer(
        self, exchange: Exchange, body: RequestBody, stream: ClientStream, id_prefix: str
    ) -> None:
        answer = Answer(
            id_prefix + exchange.request_id,
            int(time.time()),
            self._options.model_name,
            self._tokenizer,
            body.shown_prompt(stream.request.token_ids, self._tokenizer),
            body.include_usage,
        )
        num_logprobs = stream.request.sampling.num_logprobs
        shown: Format
        parser = None
        if isinstance(body, CompletionRequest):
            shown = CompletionFormat(answer, num_logprobs)
        else:
            chat = body.chat()
            parser = self._tokenizer.message_parser(stream.request.token_ids, chat.schemas)
            fields = MessageFields(parser, answer.response_id, several_calls=chat.several_calls)
            if isinstance(body, ResponsesRequest):
                shown = ResponsesFormat(answer, body, fields)
            else:
                shown = ChatFormat(answer, num_logprobs, fields)
        with_marks = parser is not None
        async with aclosing(
            pieces(stream, self._tokenizer, body.stop, with_marks=with_marks)
        ) as texts:
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
                await exchange.write(shown.error_chunk(error), more=False)
                return
        tail = shown.usage_chunk(self._usage(stream, answer)) if body.include_usage else b""
        await exchange.write(tail + shown.done, more=False)

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

    # --- the model

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
