"""From a front end's request to one the core can plan: checked, tokenised and hashed once."""

import dataclasses
import functools
import hashlib
import secrets
from array import array
from collections.abc import Sequence
from typing import Any

from disagg.errors import (
    ConfigError,
    ContextLengthError,
    ModelNotFoundError,
    RequestError,
)
from disagg.kv.hashing import tenant_salt
from disagg.messages.sampling import SamplingParams
from disagg.messages.session import CLAIM_BYTES
from disagg.router.callers import Caller
from disagg.router.chat import Chat
from disagg.router.client_text import clip
from disagg.router.dispatch import Dispatcher
from disagg.router.generation_request import GenerationRequest
from disagg.router.options import RouterOptions
from disagg.router.prompt_tokenizer import PromptTokenizer
from disagg.router.tokenizer import Tokenizer
from disagg.routing.actions import NewRequest
from disagg.routing.revisions import Revision
from disagg.routing.slo import Slo


class Preparation:
    """Nothing reaches the core, let alone a worker, that was not checked here.

    Attributes:
        prompts: tokenises them; its threads end when it is closed.
    """

    def __init__(self, options: RouterOptions, tokenizer: Tokenizer, dispatcher: Dispatcher):
        """Raise ConfigError where the checkpoint's own sampling defaults are out of bounds."""
        self._options = options
        self._tokenizer = tokenizer
        self._grammars = tokenizer.grammars
        self._dispatcher = dispatcher
        self.prompts = PromptTokenizer(options, tokenizer)
        self._slo = Slo(options.slo_ttft_ms, options.slo_tpot_ms, options.slo_shed)
        defaults: Any = tokenizer.sampling_defaults
        try:
            GenerationRequest("", "-", "prompt", max_tokens=None, **defaults).check()
        except RequestError as error:
            raise ConfigError(
                f"generation_config.json: {error.param} {error.message}", param="model"
            ) from error

    def check_model(self, model: str) -> None:
        """Raise ModelNotFoundError unless ``model`` is served here."""
        if model != self._options.model_name:
            raise ModelNotFoundError(
                f"the model {clip(model)!r} does not exist; "
                f"{self._options.model_name!r} is served here",
                param="model",
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
        token_ids, (hashes,) = await self.prompts.tokens(
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
        self.prompts.check_ids([token for token, _ in request.logit_bias], "logit_bias")
        self.prompts.check_ids(request.stop_token_ids, "stop_token_ids")
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
            hand_over=request.hand_over,
        )

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
            await self.prompts.in_thread(tenant, len(grammar), check)

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
