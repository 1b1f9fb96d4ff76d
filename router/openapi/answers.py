"""The JSON that clients get."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answered(BaseModel):
    """An object of an answer; it has no other fields."""

    model_config = ConfigDict(extra="forbid")


class TokensDetails(Answered):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(Answered):
    """Tokens of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokensDetails


class PromptLogprob(Answered):
    """A token at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By place; objects by token id."""
FinishReason = Literal["stop", "length"]


class CompletionLogprobs(Answered):
    """Four lists in step, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answered):
    """One text that continues a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(Answered):
    """Answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class FunctionCall(Answered):
    """What is called, with the text of its arguments."""

    name: str
    arguments: str


class Call(Answered):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Answered):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class NamedLogprob(Answered):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(NamedLogprob):
    """A token of the answer, and the best ones at its place."""

    top_logprobs: list[NamedLogprob]


class ChatLogprobs(Answered):
    """Of every token of a message."""

    content: list[TokenLogprob]


class ChatChoice(Answered):
    """One message of the assistant."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    token_ids: list[int] | None = None


class ChatCompletion(Answered):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class OutputText(Answered):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class ReasoningText(Answered):
    """Text of what was thought."""

    type: Literal["reasoning_text"]
    text: str


class _OutputItem(Answered):
    id: str
    status: Literal["completed", "incomplete", "in_progress"]


class OutputMessage(_OutputItem):
    """What the model says."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(_OutputItem):
    """What it thought."""

    type: Literal["reasoning"]
    content: list[ReasoningText]
    summary: list[Any]


class OutputCall(_OutputItem):
    """What it calls."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputTokensDetails(Answered):
    """Of the tokens of an answer."""

    reasoning_tokens: int


class ResponseUsage(Answered):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: TokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Answered):
    """Why a response is cut."""

    reason: Literal["max_output_tokens"]


class Response(Answered):
    """Answer of ``/v1/responses``; much of it repeats the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[
        Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]
    ]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage


class Tokenized(Answered):
    """Answer of ``/tokenize``."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answered):
    """Answer of ``/detokenize``."""

    prompt: str


class Model(Answered):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["disagg"]
    max_model_len: int | None
    revisions: list[str]


class ModelList(Answered):
    """All models: the one."""

    object: Literal["list"]
    data: list[Model]


class Status(Answered):
    """Whether the router can serve; all but the first two for keys that may observe."""

    status: Literal["ok", "stopping"]
    ready: bool
    router: str | None = None
    missing: list[str] | None = None
    model: str | None = None
    num_workers: int | None = None
    num_workers_ready: int | None = None
    num_requests: int | None = None
    num_waiting: int | None = None
    revisions: list[str] | None = None


class Fault(Answered):
    """What is wrong, and of which field or setting."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Answered):
    """Every answer that is no success."""

    error: Fault
