"""From a front end's request to one the core can plan: checked, tokenised and hashed once."""

import dataclasses
import functools
import hashlib
import re
import secrets
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from disagg.errors import (
    ConfigError,
    ContextLengthError,
    ModelNotFoundError,
    RequestError,
)
from disagg.kv.hashing import tenant_salt
from disagg.messages.registration import WorkerInfo
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import CLAIM_BYTES
from disagg.router.callers import Caller
from disagg.router.chat import Chat
from disagg.router.dispatch import Dispatcher
from disagg.router.fair_threads import FairThreads
from disagg.router.generation_request import GenerationRequest, Prompt
from disagg.router.options import RouterOptions
from disagg.router.tokenizer import Tokenizer
from disagg.routing.actions import NewRequest
from disagg.routing.fair_queue import parse_weights
from disagg.routing.revisions import Revision
from disagg.routing.slo import Slo

UTF8_BYTES_MAX = 4
"""Of one character."""
INLINE_CHARS_MAX = 2_000
"""Shorter prompts are tokenised on the event loop; a thread costs more."""
THREADS = 2
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@|~,;\-]{1,128}")
"""What may be logged, echoed in a header and written into a path. UUIDs, hex, base64, trace ids of
proxies such as ``Root=1-67891233-abcdef`` and ``a/b`` fit."""
SHOWN_CHARS_MAX = 128
_T = TypeVar("_T")


def usable_as_request_id(given: str) -> bool:
    """Whether a client's id can be logged and echoed safely."""
    return REQUEST_ID.fullmatch(given) is not None


def clip(text: str) -> str:
    """Text of a client for an error, at most ``SHOWN_CHARS_MAX`` characters of it."""
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"


class Preparation:
    """Nothing reaches the core, let alone a worker, that was not checked here."""

    def __init__(self, options: RouterOptions, tokenizer: Tokenizer, dispatcher: Dispatcher):
        """Raise ConfigError where the checkpoint's own sampling defaults are out of bounds."""
        self._options = options
        self._tokenizer = tokenizer
        self._grammars = tokenizer.grammars
        self._dispatcher = dispatcher
        weights = parse_weights(options.tenant_weights)
        self._threads = FairThreads(THREADS, options.requests_max, weights)
        self._slo = Slo(options.slo_ttft_ms, options.slo_tpot_ms, options.slo_shed)
        defaults: Any = tokenizer.sampling_defaults
        try:
            GenerationRequest("", "-", "prompt", max_tokens=None, **defaults).check()
        except RequestError as error:
            raise ConfigError(
                f"generation_config.json: {error.param} {error.message}", param="model"
            ) from error

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def check_model(self, model: str) -> None:
        """Raise ModelNotFoundError unless ``model`` is served here."""
        if model != self._options.model_name:
            raise ModelNotFoundError(
                f"the model {clip(model)!r} does not exist; "
                f"{self._options.model_name!r} is served here",
                param="model",
            )

    def check_tokenizer(self, info: WorkerInfo) -> None:
        """Refuse a worker whose checkpoint has another tokenizer than this router's.

        Prompts and answers would be other text there.

        Raises:
            ConfigError: naming both.
        """
        ours, theirs = self._tokenizer.digest, info.tokenizer_digest
        if ours and theirs and ours != theirs:
            raise ConfigError(
                f"the checkpoint of {info.incarnation.worker_id} has another tokenizer or "
                f"vocabulary than this router's model.dir ({theirs[:16]} there, {ours[:16]} here): "
                "it needs a router of its own",
                param="tokenizer_digest",
            )

    async def prepare(
        self,
        request: GenerationRequest,
        request_id: str,
        caller: Caller,
        received_ms: int,
        num_choices: int = 1,
        revision: Revision | None = None,
    ) -> NewRequest:
        """Check, tokenise and hash.

        Args:
            request: what is wanted.
            request_id: as the client gave it, "" for an own one; what its tenant sends again under
                the same one is served once, by all routers together.
            caller: whose request it is; it meets no other tenant's prefixes and records.
            received_ms: when all of it had come.
            num_choices: that generate so many tokens, for the client's one request.
            revision: that the client's other prompts have; None: one is assigned.

        Raises:
            RequestError: a field is wrong, by name.
            RemoteFault: no worker is ready, or the router is about to end.
            CapacityError: too many requests are being prepared.
        """
        self._dispatcher.check_accepts()
        request.check()
        self.check_model(request.model)
        slo = self._slo.overridden(request.ttft_ms, request.tpot_ms, request.shed)
        if isinstance(request.prompt, Chat) and request.prompt.schemas:
            self._check_tools()
        own_id = caller.own_id(request_id or secrets.token_hex(12))
        core = self._dispatcher.core
        if revision is None:
            revision = core.assign(own_id)
        limit = core.max_model_tokens_of(revision)
        salt = tenant_salt(caller.tenant, request.cache_salt)
        token_ids, (hashes,) = await self.tokens(
            request.prompt,
            request.prompt_field,
            limit,
            salt,
            caller.tenant,
            request.add_special_tokens,
            revisions=(revision,),
        )
        room = limit - len(token_ids)
        if room < 1:
            raise ContextLengthError(
                f"has {len(token_ids)} tokens; prompt and output together may have {limit}",
                param=request.prompt_field,
            )
        max_tokens = request.max_tokens
        if max_tokens is None:
            usual = core.default_model_tokens_of(revision) - len(token_ids)
            most = min(room, max(1, self._options.generation_tokens_max // num_choices))
            max_tokens = min(request.default_max_tokens or (usual if usual > 0 else room), most)
        elif max_tokens * num_choices > self._options.generation_tokens_max:
            each = f" for each of {num_choices} choices" if num_choices > 1 else ""
            raise RequestError(
                f"{max_tokens} tokens{each} are more than limits.generation_tokens_max, "
                f"{self._options.generation_tokens_max}, lets a request generate",
                param=request.max_tokens_field,
            )
        elif max_tokens > room:
            raise ContextLengthError(
                f"{len(token_ids)} prompt tokens and {max_tokens} to generate exceed {limit}",
                param=request.max_tokens_field,
            )
        request.check_min_tokens(max_tokens)
        self.check_ids([token for token, _ in request.logit_bias], "logit_bias")
        self.check_ids(request.stop_token_ids, "stop_token_ids")
        self._check_prompt_logprobs(request, len(token_ids))
        if isinstance(request.prompt, Chat):
            request = self._with_grammar(request, request.prompt, token_ids)
        if request.grammar:
            await self._check_grammar(request, caller.tenant)
        sampling = self._sampling(request, max_tokens, len(token_ids))
        return NewRequest(
            own_id,
            token_ids,
            tuple(hashes),
            salt,
            sampling,
            caller.tenant,
            _claim(caller.tenant, request_id, token_ids) if request_id else b"",
            request.priority,
            slo,
            received_ms=received_ms,
            revision=revision,
        )

    async def tokens(
        self,
        prompt: Prompt,
        field: str,
        limit: int,
        salt: bytes,
        tenant: str,
        add_special_tokens: bool | None = None,
        *,
        revisions: Sequence[Revision],
    ) -> tuple[tuple[int, ...], list[list[bytes]]]:
        """Tokens of a prompt, and its block hashes by revision; in a thread when it is long.

        See ``GenerationRequest.add_special_tokens``.

        Raises:
            RequestError: an id outside the vocabulary, or a prompt certainly too long.
            CapacityError: too many requests are being prepared.
        """
        size = self.check_size(prompt, field, limit)
        if size <= INLINE_CHARS_MAX:
            found = self._tokens(prompt, field, salt, add_special_tokens, revisions)
        else:
            work = functools.partial(
                self._tokens, prompt, field, salt, add_special_tokens, revisions
            )
            found = await self.in_thread(tenant, size, work)
        most, why = self._tokens_max(limit)
        if why and len(found[0]) > most:
            raise ContextLengthError(
                f"has {len(found[0])} tokens; {most} are possible{why}", param=field
            )
        return found

    async def in_thread(self, tenant: str, size: int, work: Callable[[], _T]) -> _T:
        """Do what takes longer than a thread costs; see `FairThreads.run`."""
        return await self._threads.run(tenant, max(size, 1), work)

    def check_size(self, prompt: Prompt, field: str, limit: int) -> int:
        """Refuse a prompt that is not worth tokenising; returns its characters, or its token ids.

        Raises:
            RequestError: it has more text than is taken.
            ContextLengthError: it cannot fit.
        """
        if isinstance(prompt, tuple):
            size, per_unit = len(prompt), 1
        else:
            texts = (prompt,) if isinstance(prompt, str) else prompt.texts
            size, per_unit = sum(map(len, texts)), self._tokenizer.token_chars_max
            if size * UTF8_BYTES_MAX > self._options.prompt_bytes_max:
                self._check_bytes(texts, field)
        most, why = self._tokens_max(limit)
        if size > most * per_unit:
            raise ContextLengthError(f"is too long; {most} tokens are possible{why}", param=field)
        return size

    def _tokens_max(self, limit: int) -> tuple[int, str]:
        """What a prompt may have at most, and the setting that says so if it is one."""
        own = self._options.prompt_tokens_max
        return (own, " (limits.prompt_tokens_max)") if 0 < own < limit else (limit, "")

    def _check_tools(self) -> None:
        """Raise RequestError unless calls of tools can be found in what the model writes."""
        if not self._tokenizer.messages.tools:
            raise RequestError(
                "no format of tool calls is known of this model; see model.tool_call_parser",
                param="tools",
            )

    def _with_grammar(
        self, request: GenerationRequest, chat: Chat, token_ids: Sequence[int]
    ) -> GenerationRequest:
        """The same with the grammar that its tools and the model's reasoning make necessary.

        Raises:
            RequestError: the grammar is too long, or does not go with another field.
        """
        schema = chat.json_schema
        if schema is None and not chat.must_call:
            return request
        messages, prompt_end = self._tokenizer.messages, self._tokenizer.end_of(token_ids)
        if not (chat.must_call or chat.schemas or messages.reasons_first(prompt_end)):
            return request
        request = dataclasses.replace(
            request,
            grammar=messages.grammar(
                prompt_end,
                chat.schemas,
                several=chat.several_calls,
                json_schema=None if chat.must_call else schema,
            ),
            grammar_field="tool_choice" if chat.must_call else "response_format",
        )
        request.check()
        return request

    def _check_bytes(self, texts: Sequence[str], field: str) -> None:
        """Raise RequestError for more text than is worth looking at; token ids have their own."""
        num_bytes = sum(len(text.encode()) for text in texts)
        if num_bytes > self._options.prompt_bytes_max:
            raise RequestError(
                f"has {num_bytes} bytes, at most {self._options.prompt_bytes_max} are taken "
                "(limits.prompt_bytes_max)",
                param=field,
            )

    def _check_prompt_logprobs(self, request: GenerationRequest, num_tokens: int) -> None:
        """Raise RequestError where there would be more than the router keeps of one request."""
        if request.num_prompt_logprobs is None:
            return
        each, bound = 1 + request.num_prompt_logprobs, self._options.prompt_logprobs_max
        if num_tokens * each > bound:
            raise RequestError(
                f"{num_tokens} tokens of the prompt with {each} log-probabilities each are more "
                f"than limits.prompt_logprobs_max={bound}",
                param=request.prompt_logprobs_field,
            )

    async def _check_grammar(self, request: GenerationRequest, tenant: str) -> None:
        """Raise RequestError unless some answer can match the grammar and then end."""
        field, grammar = request.grammar_field, request.grammar
        if not self._tokenizer.eos_token_ids:
            raise RequestError("the checkpoint names no token that ends an answer", param=field)
        if not self._grammars.knows(grammar):
            check = functools.partial(self._grammars.check, grammar, field)
            await self.in_thread(tenant, len(grammar), check)

    def _tokens(
        self,
        prompt: Prompt,
        field: str,
        salt: bytes,
        add_special: bool | None,
        revisions: Sequence[Revision],
    ) -> tuple[tuple[int, ...], list[list[bytes]]]:
        token_ids: tuple[int, ...]
        if isinstance(prompt, str):
            special = add_special is not False
            token_ids = self._tokenizer.encode(prompt, add_special_tokens=special)
        elif isinstance(prompt, Chat):
            special = bool(add_special)
            token_ids = self._tokenizer.encode_chat(prompt, add_special_tokens=special)
        else:
            token_ids = prompt
        if not token_ids:
            raise RequestError("has no tokens", param=field)
        self.check_ids(token_ids, field)
        return token_ids, [revision.hashes(token_ids, salt) for revision in revisions]

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raise RequestError, naming ``field``, where an id is none of the vocabulary."""
        # An id the model lacks would fail the step of every sequence in the batch.
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._tokenizer.vocab_size:
            raise RequestError(
                f"token ids must be from 0 to {self._tokenizer.vocab_size - 1}", param=field
            )

    def _sampling(
        self, request: GenerationRequest, max_tokens: int, num_prompt_tokens: int
    ) -> SamplingParams:
        defaults = self._tokenizer.sampling_defaults
        eos = self._tokenizer.eos_token_ids
        stops = (*(() if request.ignore_eos else eos), *request.stop_token_ids)

        def chosen(name: str, neutral: float) -> float:
            asked: float | None = getattr(request, name)
            return float(defaults.get(name, neutral) if asked is None else asked)

        return SamplingParams(
            max_tokens=max_tokens,
            temperature=chosen("temperature", 1.0),
            top_p=chosen("top_p", 1.0),
            top_k=max(int(chosen("top_k", 0)), 0),
            min_p=chosen("min_p", 0.0),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=chosen("repetition_penalty", 1.0),
            logit_bias=request.logit_bias,
            num_prompt_tokens=num_prompt_tokens,
            grammar=request.grammar,
            seed=secrets.randbits(63) if request.seed is None else request.seed,
            stop_token_ids=tuple(dict.fromkeys(stops)),
            eos_token_ids=eos if request.grammar and request.stop_token_ids else (),
            min_tokens=request.min_tokens,
            num_logprobs=request.num_logprobs,
            num_prompt_logprobs=request.num_prompt_logprobs,
        )


def _claim(tenant: str, request_id: str, token_ids: Sequence[int]) -> bytes:
    """The name that a request has at all routers.

    The prompt is a part of it: services hand one id on to several requests of their own.
    """
    parts = (tenant.encode(), request_id.encode(), array("q", token_ids).tobytes())
    named = hashlib.blake2b(digest_size=CLAIM_BYTES)
    for part in parts:
        named.update(len(part).to_bytes(8, "little") + part)
    return named.digest()
