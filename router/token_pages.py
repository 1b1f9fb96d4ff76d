"""Text to tokens and back for clients: what a prompt would cost, and what ids stand for."""

from functools import partial

from disagg.router.dispatch import Dispatcher
from disagg.router.http_exchange import Exchange
from disagg.router.openai.tokenize_request import (
    TokenizeRequest,
    parse_detokenize,
    parse_tokenize,
)
from disagg.router.request_bodies import RequestBodies
from disagg.router.request_preparation import Preparation
from disagg.router.tokenizer import Tokenizer

ANY_TOKENS = 2**31
"""No worker is there to say how many a prompt may have."""


class TokenPages:
    """``/tokenize`` and ``/detokenize`` in vLLM's form. No worker hears of them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        preparation: Preparation,
        dispatcher: Dispatcher,
        bodies: RequestBodies,
    ) -> None:
        self._tokenizer = tokenizer
        self._preparation = preparation
        self._prompts = preparation.prompts
        self._dispatcher = dispatcher
        self._bodies = bodies

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize: the ids of a prompt or of rendered messages."""
        request = await self._bodies.read(exchange, parse_tokenize)
        self._check_model(request.model)
        limit = self._dispatcher.core.max_model_tokens
        given = request.chat() if request.prompt is None else request.prompt
        size = self._prompts.check_size(given, request.prompt_field, limit or ANY_TOKENS)
        work = partial(self._encode, request)
        ids = await self._prompts.in_thread(exchange.caller.tenant, size, work)
        name = self._tokenizer.token_bytes
        await exchange.json(
            {
                "count": len(ids),
                "max_model_len": limit or None,
                "tokens": ids,
                "token_strs": (
                    [name(token_id).decode(errors="replace") for token_id in ids]
                    if request.return_token_strs
                    else None
                ),
            }
        )

    async def detokenize(self, exchange: Exchange) -> None:
        """POST /detokenize: the text of ids, special tokens by name."""
        request = await self._bodies.read(exchange, parse_detokenize)
        self._check_model(request.model)
        limit = self._dispatcher.core.max_model_tokens or ANY_TOKENS
        size = self._prompts.check_size(tuple(request.tokens), "tokens", limit)
        self._prompts.check_ids(request.tokens, "tokens")
        work = partial(self._tokenizer.decode_all, request.tokens)
        text = await self._prompts.in_thread(exchange.caller.tenant, size, work)
        await exchange.json({"prompt": text})

    def _encode(self, request: TokenizeRequest) -> tuple[int, ...]:
        if request.prompt is not None:
            special = request.add_special_tokens is not False
            return self._tokenizer.encode(request.prompt, add_special_tokens=special)
        return self._tokenizer.encode_chat(
            request.chat(),
            add_special_tokens=bool(request.add_special_tokens),
            add_generation_prompt=request.add_generation_prompt,
        )

    def _check_model(self, model: str | None) -> None:
        if model is not None:
            self._preparation.check_model(model)
