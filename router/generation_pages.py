"""The pages that generate: completions, chat completions, responses."""

import asyncio
import functools
import time
from collections.abc import Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from disagg.errors import CancelledError, DisaggError, RequestError
from disagg.router.chat import Chat
from disagg.router.choices import Choices, Pieces, Texts
from disagg.router.client_requests import PROMPT_LOGPROBS_SHARE
from disagg.router.comments import commented
from disagg.router.dispatch import Dispatcher
from disagg.router.explanation import plan_header, wants_debug
from disagg.router.http_exchange import Exchange
from disagg.router.observed_call import ObservedCall
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
from disagg.router.request_bodies import RequestBodies
from disagg.router.request_preparation import Preparation
from disagg.router.text_stream import Piece, TextReader
from disagg.router.tokenizer import Tokenizer
from disagg.routing.actions import NewRequest

EVENTS = b"text/event-stream; charset=utf-8"
NOT_KEPT = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""By caches and proxies on the way."""
TEXT, CHAT = "text_completion", "chat"
"""``gen_ai.operation.name`` of OpenTelemetry."""
RequestBody = CompletionRequest | ChatRequest | ResponsesRequest


class GenerationPages:
    """From a body to its answer, streamed or whole."""

    def __init__(
        self,
        options: RouterOptions,
        tokenizer: Tokenizer,
        dispatcher: Dispatcher,
        preparation: Preparation,
        streams: OpenStreams,
        bodies: RequestBodies,
    ) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._preparation = preparation
        self._streams = streams
        self._bodies = bodies

    async def completions(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        await self._generate(exchange, parse_completion, "cmpl-", TEXT)

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        await self._generate(exchange, parse_chat, "chatcmpl-", CHAT)

    async def responses(self, exchange: Exchange) -> None:
        """POST /v1/responses."""
        await self._generate(exchange, parse_responses, "resp_", CHAT)

    async def _generate(
        self,
        exchange: Exchange,
        parse: Callable[[bytes], RequestBody],
        id_prefix: str,
        operation: str,
    ) -> None:
        name, caller = f"{exchange.method} {exchange.path}", exchange.caller
        observers = self._dispatcher.observers
        with (
            observers.call(name, operation, exchange.headers, caller.tenant) as call,
            self._streams.open(caller),
        ):
            await self._serve(exchange, parse, id_prefix, call)

    async def _serve(
        self,
        exchange: Exchange,
        parse: Callable[[bytes], RequestBody],
        id_prefix: str,
        call: ObservedCall,
    ) -> None:
        explains = wants_debug(exchange.headers, exchange.caller)
        body = await self._bodies.read(exchange, parse)
        prompts = await self._prepare(exchange, body)
        if exchange.has_left:
            raise CancelledError("the client left")
        request_id = exchange.caller.shown_id(prompts[0].request_id)
        shown, texts = self._reading(body, prompts, id_prefix + request_id)
        choices = Choices(self._dispatcher, prompts, body.form.num_each, texts, call)
        exchange.on_left(lambda: choices.cancel("client left"))
        exchange.request_id = request_id  # also of one that is refused: its record says why
        await choices.start()
        try:
            await self._answer(exchange, body, choices, shown, explains=explains)
        finally:
            choices.cancel("not answered")  # only what still lives: the handler failed

    async def _prepare(self, exchange: Exchange, body: RequestBody) -> list[NewRequest]:
        """Prepare every prompt of a body; no worker hears of them."""
        form = body.form
        num_choices = body.num_prompts * form.num_each
        for setting in ("choices_max", "requests_max"):
            if num_choices > (most := getattr(self._options, setting)):
                raise RequestError(
                    f"{num_choices} choices are more than limits.{setting}, {most}",
                    param=form.num_each_field,
                )
        wanted = body.generation_requests()
        received_ms = self._dispatcher.now_ms()
        prompts: list[NewRequest] = []
        for number, request in enumerate(wanted):
            if number:  # what is short is prepared here, and others wait
                await asyncio.sleep(0)
            prompts.append(
                await self._preparation.prepare(
                    request,
                    exchange.request_id,
                    exchange.caller,
                    received_ms,
                    num_choices,
                    prompts[0].revision if prompts else None,
                )
            )
        num_numbers = sum(prompt.num_prompt_numbers for prompt in prompts)
        if num_numbers > (most := PROMPT_LOGPROBS_SHARE * self._options.prompt_logprobs_max):
            raise RequestError(
                f"{num_numbers} log-probabilities of all prompts are more than "
                f"{PROMPT_LOGPROBS_SHARE} times limits.prompt_logprobs_max, {most}",
                param=wanted[0].prompt_logprobs_field,
            )
        return prompts

    def _reading(
        self, body: RequestBody, prompts: list[NewRequest], response_id: str
    ) -> tuple[Format, Texts]:
        """How the answer is shown, and how the tokens of its choices become text."""
        answer = Answer(
            response_id,
            int(time.time()),
            self._options.model_name,
            self._tokenizer,
            [
                body.shown_prompt(number, prompt.token_ids, self._tokenizer)
                for number, prompt in enumerate(prompts)
            ],
            body.form,
        )
        shown: Format
        with_marks = False
        if isinstance(body, CompletionRequest):
            shown = CompletionFormat(answer)
        else:
            messages = self._messages(answer, body.chat)
            with_marks = messages[0].reads_marks
            if isinstance(body, ResponsesRequest):
                shown = ResponsesFormat(answer, body, messages[0])
            else:
                shown = ChatFormat(answer, messages)
        texts = functools.partial(
            TextReader,
            tokenizer=self._tokenizer,
            stop=body.stop,
            with_marks=with_marks,
            skip_special_tokens=body.form.skip_special_tokens,
        )
        return shown, texts

    def _messages(self, answer: Answer, chat: Chat) -> list[MessageFields]:
        """What reads the message of each choice; the ids of its calls are its own."""
        answer_id, token_ids = answer.response_id, answer.prompts[0].token_ids
        one_only = len(answer) == 1
        return [
            MessageFields(
                self._tokenizer.message_parser(token_ids, chat.schemas),
                answer_id if one_only else f"{answer_id}-{index}",
                several_calls=chat.several_calls,
            )
            for index in range(len(answer))
        ]

    async def _answer(
        self,
        exchange: Exchange,
        body: RequestBody,
        choices: Choices,
        shown: Format,
        *,
        explains: bool,
    ) -> None:
        async with aclosing(choices.pieces()) as texts:
            if body.stream:
                last = await self._stream(exchange, choices, texts, shown, explains=explains)
            else:
                # What comes before the end wakes nobody.
                choices.write_through(_always, functools.partial(shown.add, 0))
                async for index, piece in texts:
                    shown.add(index, piece)
                if explains:
                    exchange.more_headers += plan_header(choices.first_record)
                await exchange.json(shown.body(_usage(choices)))
                return
        if last is not None:
            tail = shown.usage_chunk(_usage(choices)) if body.include_usage else b""
            await exchange.write(last + tail + shown.done, more=False)

    async def _stream(
        self,
        exchange: Exchange,
        choices: Choices,
        texts: Pieces,
        shown: Format,
        *,
        explains: bool,
    ) -> bytes | None:
        """All chunks but the last, which is returned; None after an error's, which is the last."""

        async def send(data: bytes) -> None:
            if exchange.started:
                await exchange.stream(data)
            else:
                await exchange.start(HTTPStatus.OK, EVENTS, NOT_KEPT, data)

        def write(piece: Piece) -> None:
            if chunk := shown.chunk(0, piece):
                exchange.write_now(chunk)

        last, has_begun = b"", False
        try:
            first = await commented(anext(texts), send, self._options.comment_ms)
            if explains:
                exchange.more_headers += plan_header(choices.first_record)
            has_begun = True
            await send(shown.first_chunk() + shown.chunk(*first))
            num_left = len(choices) - bool(first[1].finish_reason)
            choices.write_through(exchange.is_writable, write)
            async for index, piece in texts:
                chunk = shown.chunk(index, piece)
                num_left -= bool(piece.finish_reason)
                if not num_left:  # it goes with what ends the answer
                    last = chunk
                elif chunk:
                    await exchange.stream(chunk)
        except CancelledError:
            raise
        except DisaggError as error:
            if not exchange.started:
                raise  # it has a status of its own
            head = b"" if has_begun else shown.first_chunk()
            await exchange.write(head + shown.error_chunk(error), more=False)
            return None
        return last


def _always() -> bool:
    return True


def _usage(choices: Choices) -> dict[str, Any]:
    return usage_body(choices.num_prompt_tokens, choices.num_tokens, choices.num_cached_tokens)
