"""The HTTP front: a raw ASGI application in OpenAI's shape."""

import time
from typing import Any

from disagg.router.callers import SERVE
from disagg.router.dispatch import Dispatcher
from disagg.router.fair_threads import FairThreads
from disagg.router.generation_pages import GenerationPages
from disagg.router.http_exchange import Exchange, Receive, Scope, Send
from disagg.router.http_site import Page, Site
from disagg.router.keys import KeyRing
from disagg.router.metrics import Metrics
from disagg.router.open_streams import OpenStreams
from disagg.router.openapi import operations
from disagg.router.options import RouterOptions
from disagg.router.request_bodies import RequestBodies
from disagg.router.request_preparation import Preparation
from disagg.router.status_pages import StatusPages
from disagg.router.token_pages import TokenPages
from disagg.router.tokenizer import Tokenizer
from disagg.routing.fair_queue import parse_weights


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
        self._dispatcher = dispatcher
        self._preparation = preparation
        self._created = int(time.time())
        # One, as what it does keeps Python's lock: several would let the event loop wait for all.
        self._parsing = FairThreads(
            1, options.requests_max, parse_weights(options.tenant_weights), rests=True
        )
        bodies = RequestBodies(options, self._parsing)
        self._generation = generation = GenerationPages(
            options, tokenizer, dispatcher, preparation, streams, bodies
        )
        tokens = TokenPages(tokenizer, preparation, dispatcher, bodies)
        status = StatusPages(options, dispatcher)
        serve = frozenset((SERVE,))
        self._site = Site(
            "disagg: clients",
            options,
            keys,
            metrics,
            {
                ("POST", "/v1/completions"): Page(
                    generation.completions, operations.COMPLETIONS, serve
                ),
                ("POST", "/v1/chat/completions"): Page(generation.chat, operations.CHAT, serve),
                ("POST", "/v1/responses"): Page(generation.responses, operations.RESPONSES, serve),
                ("POST", "/tokenize"): Page(tokens.tokenize, operations.TOKENIZE, serve),
                ("POST", "/detokenize"): Page(tokens.detokenize, operations.DETOKENIZE, serve),
                ("GET", "/v1/models"): Page(self._models, operations.MODELS, serve),
                **status.pages,
            },
            {"/v1/models/": Page(self._model, operations.MODEL, serve)},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        await self._site(scope, receive, send)

    def close(self) -> None:
        """End its thread."""
        self._parsing.close()

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
            "revisions": [one.name for one in self._dispatcher.core.serving],
        }
