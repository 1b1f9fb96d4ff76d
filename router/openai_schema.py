"""The OpenAI request bodies: every field is checked, ignored by name, or refused by name."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from disagg.errors import RequestError
from disagg.grammar.json_grammars import ANY_OBJECT, json_grammar
from disagg.messages.sampling import TOP_LOGPROBS_MAX
from disagg.router.generation_request import (
    CACHE_SALT_CHARS_MAX,
    LOGIT_BIAS_MAX,
    PENALTY_MAX,
    REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN,
    TEMPERATURE_MAX,
    GenerationRequest,
)

TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
COMPLETION_LOGPROBS_MAX = 5
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions."""

IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Accepted and without effect: they do not change what is generated."""

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Known fields that would change the answer: only null and these neutral values pass."""

MESSAGE_IGNORED = ("annotations", "audio", "function_call", "refusal", "tool_calls")
"""What clients echo of an assistant's message; only empty ones pass."""


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    if isinstance(value, list) and all(isinstance(item, str | list) for item in value):
        raise ValueError("several prompts in one request are not supported; send one each")
    raise ValueError("must be a string or a list of token ids")


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("must be a string or a list of strings")


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        # Exactly the digits: int() takes signs, blanks and underscores too.
        if not TOKEN_ID.fullmatch(token):
            raise ValueError("its keys must be token ids")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError("its values must be numbers")
        if not -LOGIT_BIAS_MAX <= bias <= LOGIT_BIAS_MAX:
            raise ValueError(
                f"its values must be between {-LOGIT_BIAS_MAX:g} and {LOGIT_BIAS_MAX:g}"
            )
        biases[int(token)] = float(bias)
    return tuple(sorted(biases.items()))


def _content(value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError("only parts of type 'text' are supported")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError("a text part has exactly 'type' and a string 'text'")
        texts.append(part["text"])
    return "".join(texts)


class _Strict(BaseModel):
    # What users write stays out of every repr and of pydantic's errors: both may reach a log.
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )


class StreamOptions(_Strict):
    """The ``stream_options`` of a request: whether its stream ends with the usage."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: chunks are never padded."""


class JsonSchema(_Strict):
    """The ``json_schema`` of a response format; a schema is followed with or without ``strict``."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = Field(default=None, repr=False)
    schema_: dict[str, Any] = Field(alias="schema", repr=False)
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What an answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> str:
        """See ``SamplingParams.grammar``.

        Raises:
            RequestError: a schema is lacking, or there is one that would not count.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            what = "goes" if self.json_schema else "is required"
            raise RequestError(f"{what} with type json_schema", param="response_format.json_schema")
        if self.json_schema is not None:
            return json_grammar(self.json_schema.schema_)
        return json_grammar(ANY_OBJECT) if self.type == "json_object" else ""


Penalty = Annotated[float, Field(ge=-PENALTY_MAX, le=PENALTY_MAX)]


class _Generation(_Strict):
    """Fields that the bodies of both endpoints share."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=REPETITION_PENALTY_MIN, le=REPETITION_PENALTY_MAX)] | None
    ) = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_logit_bias)] = Field(
        default=(), repr=False
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop)] = Field(default=(), repr=False)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(max_length=CACHE_SALT_CHARS_MAX)] | None = Field(
        default=None, repr=False
    )
    response_format: ResponseFormat | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def grammar(self) -> str:
        """See ``SamplingParams.grammar``."""
        return self.response_format.grammar() if self.response_format else ""


_Request = TypeVar("_Request", bound=_Generation)


class CompletionRequest(_Generation):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt), Field(repr=False)]
    logprobs: Annotated[int, Field(ge=0, le=COMPLETION_LOGPROBS_MAX)] | None = None

    def generation_request(self) -> GenerationRequest:
        """The body as a `GenerationRequest`, the form that both front ends share."""
        return GenerationRequest(
            model=self.model,
            prompt=self.prompt,
            prompt_field="prompt",
            max_tokens=self.max_tokens,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            num_logprobs=self.logprobs,
            stop=self.stop,
            ignore_eos=bool(self.ignore_eos),
            cache_salt=self.cache_salt or "",
            grammar=self.grammar,
        )


class Message(_Strict):
    """One chat message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content), Field(repr=False)]
    name: str | None = None


class ChatRequest(_Generation):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None

    def generation_request(self) -> GenerationRequest:
        """The body as a `GenerationRequest`, the form that both front ends share."""
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return GenerationRequest(
            model=self.model,
            prompt=tuple(message.model_dump(exclude_none=True) for message in self.messages),
            prompt_field="messages",
            max_tokens=getattr(self, field),
            max_tokens_field=field,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            stop=self.stop,
            ignore_eos=bool(self.ignore_eos),
            cache_salt=self.cache_salt or "",
            grammar=self.grammar,
        )


def parse_completion(body: bytes) -> CompletionRequest:
    """Check a completions body.

    Raises:
        RequestError: the first field that is wrong, unknown or unsupported, by name.
    """
    return _build(CompletionRequest.model_validate, _object(body))


def parse_chat(body: bytes) -> ChatRequest:
    """Check a chat completions body.

    Raises:
        RequestError: the first field that is wrong, unknown or unsupported, by name.
    """
    data = _object(body)
    messages = data.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in MESSAGE_IGNORED if isinstance(message, dict) else ():
            if message.pop(name, None):
                raise RequestError("is not supported", param=f"messages[{index}].{name}")
    request = _build(ChatRequest.model_validate, data)
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("needs logprobs: true", param="top_logprobs")
    if None not in (request.max_tokens, request.max_completion_tokens) and (
        request.max_tokens != request.max_completion_tokens
    ):
        raise RequestError("differs from max_completion_tokens; set one", param="max_tokens")
    return request


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    for name in IGNORED:
        data.pop(name, None)
    for name in UNSUPPORTED.keys() & data.keys():
        value = data.pop(name)
        if value is not None and not any(_same(value, ok) for ok in UNSUPPORTED[name]):
            raise RequestError(f"this value of {name} is not supported", param=name)
    return data


def _same(value: object, neutral: object) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _build(validate: Callable[[dict[str, Any]], _Request], data: dict[str, Any]) -> _Request:
    try:
        request = validate(data)
    except ValidationError as error:
        raise _request_error(error) from error
    if request.stream_options is not None and not request.stream:
        raise RequestError("is only allowed with stream: true", param="stream_options")
    return request


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    kind = first["type"]
    if kind == "extra_forbidden":
        message = "unknown field"
    elif kind == "missing":
        message = "is required"
    elif kind == "value_error":
        message = str(first["ctx"]["error"])
    else:
        message = first["msg"]
    return RequestError(message, param=param)
