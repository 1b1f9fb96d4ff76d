"""The router's gRPC service: registration of workers, generation, prefix look-ups."""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc

from disagg.errors import DisaggError, ProtocolError, RemoteFault, RequestError
from disagg.kv.hashing import tenant_salt
from disagg.messages.router import CacheMatch
from disagg.messages.sampling import STOP_TOKENS_MAX
from disagg.router.callers import SERVE, Caller, presented_key
from disagg.router.client_stream import SLOW_READER, ClientStream, SlowReaderError
from disagg.router.client_text import usable_as_request_id
from disagg.router.dispatch import Dispatcher
from disagg.router.generation_request import (
    LOGIT_BIAS_TOKENS_MAX,
    GenerationRequest,
    check_cache_salt,
)
from disagg.router.keys import KeyRing
from disagg.router.metrics import Metrics
from disagg.router.observed_call import ObservedCall
from disagg.router.open_streams import OpenStreams
from disagg.router.openai.completion_request import COMPLETION_MAX_TOKENS
from disagg.router.options import RouterOptions
from disagg.router.registrations import Refusals, check_tokenizer
from disagg.router.request_preparation import Preparation
from disagg.router.text_stream import TextReader, next_piece
from disagg.router.tokenizer import Tokenizer
from disagg.routing.followed.followed_caches import FollowedCaches
from disagg.wire.outputs_codec import prompt_logprobs_to_wire
from disagg.wire.registration_codec import worker_info_from_wire
from disagg.wire.router_codec import cache_match_to_wire, match_to_wire
from disagg.wire.sampling_codec import top_to_wire
from disagg.wire.v1 import registration_pb2, router_pb2
from disagg.wire.v1.router_pb2_grpc import RouterServicer

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
else:
    Context = grpc.aio.ServicerContext  # not subscriptable at run time
_T = TypeVar("_T")
NAME = "disagg.wire.v1.Router/Generate"
"""Of the span of a call, as OpenTelemetry names calls."""
GENERATE = f"/{NAME}"
FIELD_KEY = "disagg-field"
CODE_KEY = "disagg-code"
KEY_HEADERS = ("authorization", "x-api-key")
RETRY_AFTER_KEY = "retry-after"
"""Seconds, as HTTP's header."""
TOKENS_MAX = 1 << 24
DETAILS_MAX = 4000
"""Characters of an error's text, as gRPC carries 8 KiB of it and its metadata; the log has all."""


async def abort(context: Context, error: DisaggError) -> NoReturn:
    """End the call with the error's status; the field and code travel as trailing metadata."""
    status = grpc.StatusCode[error.grpc_status]
    if isinstance(error, ProtocolError):  # what breaks the protocol here is what the caller sent
        status = grpc.StatusCode.INVALID_ARGUMENT
    details = f"{error.param}: {error.message}" if error.param else error.message
    trailing = [(FIELD_KEY, error.param), (CODE_KEY, error.code)]
    if error.retry_after_s:
        trailing.append((RETRY_AFTER_KEY, str(error.retry_after_s)))
    await context.abort(status, details[:DETAILS_MAX], tuple(trailing))


class GrpcService(RouterServicer):
    """The same preparation, dispatch and detokenisation as over HTTP."""

    def __init__(
        self,
        options: RouterOptions,
        keys: KeyRing,
        tokenizer: Tokenizer,
        dispatcher: Dispatcher,
        preparation: Preparation,
        metrics: Metrics,
        streams: OpenStreams,
        followed: FollowedCaches,
        tell_siblings: Callable[[registration_pb2.RegisterRequest], None] | None = None,
    ) -> None:
        self._options = options
        self._keys = keys
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._preparation = preparation
        self._metrics = metrics
        self._streams = streams
        self._followed = followed
        self._tell_siblings = tell_siblings
        self._refusals = Refusals("registration of %r: %s")

    async def Register(
        self, request: registration_pb2.RegisterRequest, context: Context
    ) -> registration_pb2.RegisterResponse:
        """Take in a registration or heartbeat; other processes on this port hear of it too."""
        if self._tell_siblings is not None:
            self._tell_siblings(request)
        try:
            self.take_in(request)
        except DisaggError as error:
            await abort(context, error)
        pace = self._dispatcher.core.report_pace
        return registration_pb2.RegisterResponse(
            heartbeat_ms=pace.heartbeat_ms, stats_ms=pace.stats_ms
        )

    def take_in(self, request: registration_pb2.RegisterRequest) -> None:
        """Take in a registration or heartbeat.

        Raises:
            DisaggError: it is refused, which is logged.
        """
        try:
            info = worker_info_from_wire(request)
            self._preparation.check_model(info.model)
            check_tokenizer(info, self._tokenizer.digest)
            self._dispatcher.register(info)
        except DisaggError as error:
            self._refusals.refused(request.worker.worker_id, request.worker.epoch, error.message)
            raise
        self._refusals.taken_in(info.incarnation.worker_id, info.incarnation.epoch)

    async def Generate(  # type: ignore[override]  # the writing style: a write can be bounded
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream text and tokens; a cancelled call is cancelled at the workers."""
        try:
            caller = self._caller(context)
        except DisaggError as error:
            self._metrics.ended(error.code, "")
            await abort(context, error)
        observers, head = self._dispatcher.observers, _headers(context.invocation_metadata())
        try:
            with (
                observers.call(NAME, "text_completion", head, caller.tenant) as call,
                self._streams.open(caller),
            ):
                await self._generate(request, context, caller, call)
        except DisaggError as error:
            await abort(context, error)

    async def _generate(
        self,
        request: router_pb2.GenerateRequest,
        context: Context,
        caller: Caller,
        call: ObservedCall,
    ) -> None:
        received_ms = self._dispatcher.now_ms()
        if request.request_id and not usable_as_request_id(request.request_id):
            raise RequestError(
                "must be 1 to 128 letters, digits or any of . _ : / + = @ | ~ , ; -",
                param="request_id",
            )
        new = await self._preparation.prepare(
            _generation_request(request, self._tokens_max(0)),
            request.request_id,
            caller,
            received_ms,
        )
        stream = self._dispatcher.generate(new, call)
        reader, finish = TextReader(new, self._tokenizer), ""
        try:
            while not finish:
                piece = await next_piece(stream, reader)
                finish = piece.finish_reason
                response = router_pb2.GenerateResponse(
                    request_id=caller.shown_id(stream.request_id),
                    text=piece.text,
                    token_ids=piece.token_ids,
                    logprobs=[token.logprob for token in piece.logprobs],
                    top=[top_to_wire(token.top) for token in piece.logprobs],
                    finish_reason=piece.finish_reason,
                    num_prompt_tokens=len(new.token_ids),
                )
                if piece.prompt_logprobs:
                    scores = [one for one in piece.prompt_logprobs if one is not None]
                    response.prompt_logprobs.CopyFrom(prompt_logprobs_to_wire(1, scores))
                if piece.finish_reason:
                    record = self._dispatcher.core.record(stream.request_id)
                    response.num_cached_tokens = record.cached_tokens if record else 0
                await self._write(context, response, stream)
        finally:
            stream.cancel("client left")

    async def _write(
        self, context: Context, response: router_pb2.GenerateResponse, stream: ClientStream
    ) -> None:
        """Send one message; flow control lets it wait for a client that does not read.

        After too long its stream is given up, but not the wait: gRPC has sent no status, nor ends
        the call, while a message is on its way. So the client is told when it reads, or leaves.
        """
        timeout_s = self._options.send_timeout_ms / 1000
        loop = asyncio.get_running_loop()
        unread = loop.call_later(timeout_s, self._give_up, context.peer(), stream)
        try:
            await context.write(response)
        finally:
            unread.cancel()

    def _give_up(self, client: str, stream: ClientStream) -> None:
        logger.warning("%s does not read its answer: it is given up", client)
        timeout_ms = self._options.send_timeout_ms
        fault = f"nothing was read for {timeout_ms} ms (limits.send_timeout_ms)"
        stream.give_up(SlowReaderError(fault, request_id=stream.request_id))
        stream.cancel(SLOW_READER)  # no drain waits for it

    async def Match(
        self, request: router_pb2.MatchRequest, context: Context
    ) -> router_pb2.MatchResponse:
        """How much of a prompt each worker that takes requests holds of the caller's tenant.

        Stale answers cost time, never tokens.
        """
        try:
            caller = self._caller(context)
            self._preparation.check_model(request.model)
            # Without a worker only the prompt's size in bytes bounds it.
            limit = self._tokens_max(TOKENS_MAX)
            prompt, field = _prompt(request, limit)
            check_cache_salt(request.cache_salt)
            core = self._dispatcher.core
            revisions = core.serving
            if not revisions and not self._followed:
                raise RemoteFault("no worker is ready", retry_after_s=1)
            salt = tenant_salt(caller.tenant, request.cache_salt)
            token_ids, hashes = await self._preparation.prompts.tokens(
                prompt, field, limit, salt, caller.tenant, revisions=revisions
            )
            caches = await self._match_followed(token_ids, salt, caller.tenant)
        except DisaggError as error:
            await abort(context, error)
        found = [
            match
            for revision, chain in zip(revisions, hashes, strict=True)
            for match in core.match(revision, len(token_ids), chain)
        ]
        found.sort(key=lambda match: -match.usable_tokens)
        return router_pb2.MatchResponse(
            num_tokens=len(token_ids),
            workers=[match_to_wire(match) for match in found],
            followed=[cache_match_to_wire(match) for match in caches],
        )

    async def _match_followed(
        self, token_ids: tuple[int, ...], salt: bytes, tenant: str
    ) -> list[CacheMatch]:
        if not self._followed:
            return []
        work = functools.partial(self._followed.hashes, token_ids, salt)
        chain = await self._preparation.prompts.in_thread(tenant, len(token_ids), work)
        return self._followed.match(len(token_ids), chain, tenant)

    def _tokens_max(self, default: int) -> int:
        """Tokens of the longest prompt that any worker takes; ``default`` without one."""
        core = self._dispatcher.core
        return max(map(core.max_model_tokens_of, core.serving), default=default)

    def _caller(self, context: Context) -> Caller:
        found = caller_of(context.invocation_metadata(), self._keys)
        return found.at(address_of(context.peer()))


def caller_of(metadata: Any, keys: KeyRing) -> Caller:
    """Who calls, by the metadata that are HTTP's headers.

    Raises:
        AccessError: he may not.
        RequestError: a key is there twice; who looks at keys on the way may take either.
    """
    names = [name for name, _ in metadata or ()]
    for name in KEY_HEADERS:
        if names.count(name) > 1:
            raise RequestError("is given twice", param=name)
    caller = keys.caller(presented_key(_headers(metadata)))
    caller.check(frozenset((SERVE,)))
    return caller


def address_of(peer: str) -> str:
    """The address in what gRPC calls a peer: ``ipv4:127.0.0.1:80``, ``ipv6:%5B::1%5D:80``."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


def _headers(metadata: Any) -> dict[bytes, bytes]:
    """A call's metadata, in the form of HTTP's headers."""
    return {name.encode(): str(value).encode() for name, value in dict(metadata or ()).items()}


def _some(values: Iterable[_T], num_max: int) -> tuple[_T, ...]:
    """Values of a message, of which ``num_max`` are taken; one more, if there is, to be refused.

    It may have tens of millions, and all streams stand still while they are made Python's.
    """
    return tuple(islice(values, num_max + 1))


def _prompt(
    request: router_pb2.GenerateRequest | router_pb2.MatchRequest, tokens_max: int
) -> tuple[str | tuple[int, ...], str]:
    if request.prompt and request.token_ids:
        raise RequestError("set either prompt or token_ids", param="token_ids")
    if request.token_ids:
        return _some(request.token_ids, tokens_max), "token_ids"
    if not request.prompt:
        raise RequestError("must not be empty", param="prompt")
    return request.prompt, "prompt"


def _generation_request(request: router_pb2.GenerateRequest, tokens_max: int) -> GenerationRequest:
    prompt, field = _prompt(request, tokens_max)
    build = functools.partial(
        GenerationRequest,
        model=request.model,
        prompt=prompt,
        prompt_field=field,
        default_max_tokens=COMPLETION_MAX_TOKENS,
        ignore_eos=request.ignore_eos,
        cache_salt=request.cache_salt,
        ttft_ms=request.ttft_ms if request.HasField("ttft_ms") else None,
        tpot_ms=request.tpot_ms if request.HasField("tpot_ms") else None,
        shed=request.shed if request.HasField("shed") else None,
        hand_over=request.hand_over if request.HasField("hand_over") else None,
    )
    if not request.HasField("sampling"):
        return build(max_tokens=None)
    sampling = request.sampling
    for name in ("num_prompt_tokens", "eos_token_ids"):
        if getattr(sampling, name):
            raise RequestError("is set by the router", param=f"sampling.{name}")
    return build(
        max_tokens=sampling.max_tokens or None,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,  # 0 is "not set" in proto3
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=(
            sampling.repetition_penalty if sampling.HasField("repetition_penalty") else None
        ),
        logit_bias=tuple(sorted(_some(sampling.logit_bias.items(), LOGIT_BIAS_TOKENS_MAX))),
        seed=sampling.seed,
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        num_prompt_logprobs=(
            sampling.num_prompt_logprobs if sampling.HasField("num_prompt_logprobs") else None
        ),
        prompt_logprobs_field="sampling.num_prompt_logprobs",
        min_tokens=sampling.min_tokens,
        stop_token_ids=_some(sampling.stop_token_ids, STOP_TOKENS_MAX),
        grammar=sampling.grammar,
        grammar_field="sampling.grammar",
    )
