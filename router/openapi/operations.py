"""Every page of both ports."""

from disagg.router.drain_body import DrainBody
from disagg.router.openai.chat_request import ChatRequest
from disagg.router.openai.completion_request import CompletionRequest
from disagg.router.openai.responses_request import NEUTRAL, ResponsesRequest
from disagg.router.openai.tokenize_request import DetokenizeRequest, TokenizeRequest
from disagg.router.openapi import answers
from disagg.router.openapi.admin_answers import (
    Drained,
    Queues,
    Record,
    Reset,
    Revisions,
    Workers,
)
from disagg.router.openapi.operation import EVENTS as EVENT_STREAM
from disagg.router.openapi.operation import TEXT, Operation
from disagg.router.openapi.overview_answer import Overview
from disagg.router.revision_weights import RevisionWeights

BODY = frozenset({404, 408, 413, 429})
GENERATES = BODY | {409, 502, 503, 504}

COMPLETIONS = Operation(
    "createCompletion",
    "Texts that continue prompts.",
    {200: answers.Completion},
    body=CompletionRequest,
    errors=GENERATES,
    streams=True,
)
CHAT = Operation(
    "createChatCompletion",
    "Messages of the assistant, calls of tools among them.",
    {200: answers.ChatCompletion},
    body=ChatRequest,
    errors=GENERATES,
    streams=True,
)
RESPONSES = Operation(
    "createResponse",
    "The same in the form of OpenAI's responses; nothing is stored.",
    {200: answers.Response},
    body=ResponsesRequest,
    neutral=NEUTRAL,
    errors=GENERATES,
    streams=True,
)
TOKENIZE = Operation(
    "tokenize",
    "The token ids of a prompt or of messages.",
    {200: answers.Tokenized},
    body=TokenizeRequest,
    errors=BODY,
)
DETOKENIZE = Operation(
    "detokenize",
    "The text of token ids.",
    {200: answers.Detokenized},
    body=DetokenizeRequest,
    errors=BODY,
)
MODELS = Operation("listModels", "The model that is served.", {200: answers.ModelList})
MODEL = Operation(
    "getModel",
    "The model that is served, by its name.",
    {200: answers.Model},
    errors=frozenset({404}),
    path_parameter="model",
)
HEALTH = Operation("health", "Whether the router lives.", {200: answers.Status})
READY = Operation(
    "ready",
    "Whether the router can serve.",
    {200: answers.Status, 503: answers.Status},
)
METRICS = Operation("metrics", "Prometheus' text.", {200: TEXT})
WORKERS = Operation("listWorkers", "The fleet.", {200: Workers})
QUEUES = Operation(
    "listWaits",
    "How long requests wait, and for workers of which role.",
    {200: Queues},
)
STATUS = Operation(
    "getStatus",
    "Fleet, pools, leases, transfers and the newest requests, as workers answer now.",
    {200: Overview},
)
EVENTS = Operation(
    "followStatus",
    "The same every second, as events called status.",
    {200: EVENT_STREAM},
    errors=frozenset({429}),
)
RECORD = Operation(
    "getRequest",
    "What happened to a request of the key's tenant; for an admin of any tenant.",
    {200: Record},
    errors=frozenset({404}),
    path_parameter="id",
    query="tenant",
)
RESET = Operation(
    "resetPrefixCache",
    "Every worker forgets the KV it has cached.",
    {200: Reset, 503: Reset | answers.Error},
    errors=frozenset({429}),
)
REVISIONS = Operation("listRevisions", "What is served side by side.", {200: Revisions})
SET_REVISIONS = Operation(
    "setRevisionWeights",
    "New requests are shared by other weights.",
    {200: Revisions},
    body=RevisionWeights,
    errors=BODY - {404},
)
DRAIN = Operation(
    "drain",
    "A worker, or all workers of a host, take no new work; what goes on ends or moves.",
    {200: Drained},
    body=DrainBody,
    errors=BODY - {404},
)
DOCUMENT = Operation("getDocument", "This document.", {200: dict[str, object]})
