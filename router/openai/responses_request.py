"""The body of a request to ``/v1/responses``; nothing of it is stored."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from disagg.errors import RequestError
from disagg.messages.lazy import cached_property
from disagg.router.chat import Chat
from disagg.router.generation_request import (
    CACHE_SALT_CHARS_MAX,
    TEMPERATURE_MAX,
    GenerationRequest,
)
from disagg.router.openai.answer_form import AnswerForm
from disagg.router.openai.body import ITEMS_MAX, Strict, read_object, validate
from disagg.router.openai.chat_message import check_arguments
from disagg.router.openai.disagg_fields import DisaggFields, fields_of
from disagg.router.openai.response_format import JsonSchema, ResponseFormat
from disagg.router.openai.responses_items import CallItem, Item, as_items, messages_of
from disagg.router.openai.shown_prompt import ShownPrompt
from disagg.router.openai.stream_options import StreamOptions
from disagg.router.openai.tools import (
    FEW,
    TOOLS_MAX,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    callable_schemas,
    choice_of,
    for_template,
)
from disagg.router.tokenizer import Tokenizer

NEUTRAL: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields of which only null and these values pass; all else would need what was stored, or change
the answer."""


TAG = re.compile(r"^(input\[\d+\]|text\.format)\.\w+")
"""Which form of an item or format it is stands in pydantic's path, not in the client's."""


METADATA_MAX = 16
"""Pairs, as OpenAI has it."""
MetadataGiven = Annotated[dict[str, str], Field(max_length=METADATA_MAX)] | None
Items = Annotated[list[Item], Field(max_length=ITEMS_MAX, fail_fast=True)]


def _metadata(value: object) -> object:
    if isinstance(value, dict) and len(value) > METADATA_MAX:
        raise ValueError(f"at most {METADATA_MAX} pairs")
    return value


class FunctionTool(Function):
    """A tool in this endpoint's form."""

    type: Literal["function"]


class TextFormat(JsonSchema):
    """A schema in this endpoint's form."""

    type: Literal["json_schema"]


class PlainFormat(Strict):
    """Text or any object."""

    type: Literal["text", "json_object"]


class Text(Strict):
    """The ``text`` of a request."""

    format: Annotated[TextFormat | PlainFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """The ``reasoning`` of a request; summaries are never made."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class NamedFunction(FunctionName):
    """A choice of one function, in this endpoint's form."""

    type: Literal["function"]


class ResponsesRequest(Strict):
    """Body of ``POST /v1/responses``."""

    model: str
    input: Annotated[
        Items,
        BeforeValidator(as_items, json_schema_input_type=str | Items),
        Field(repr=False),
    ]
    instructions: str | None = Field(default=None, repr=False)
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    disagg: DisaggFields | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FunctionTool], FEW, Field(max_length=TOOLS_MAX)] | None = Field(
        default=None, repr=False
    )
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | None,
        BeforeValidator(
            choice_of,
            json_schema_input_type=Literal["none", "auto", "required"] | NamedFunction | None,
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[
        dict[str, str] | None,
        BeforeValidator(_metadata, json_schema_input_type=MetadataGiven),
    ] = Field(default=None, repr=False)
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, repr=False)
    cache_salt: Annotated[str, Field(max_length=CACHE_SALT_CHARS_MAX)] | None = Field(
        default=None, repr=False
    )

    @property
    def num_prompts(self) -> int:
        """One."""
        return 1

    @property
    def stop(self) -> tuple[str, ...]:
        """This endpoint has no stop strings."""
        return ()

    @property
    def include_usage(self) -> bool:
        """Streams always end with the usage."""
        return True

    @property
    def form(self) -> AnswerForm:
        """One answer, as plain as it is."""
        return AnswerForm()

    @cached_property
    def chat(self) -> Chat:
        """The items as a chat, and what its answer must be.

        Raises:
            RequestError: items, tools or choice do not fit together.
        """
        tools = [
            Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))
            for tool in self.tools or ()
        ]
        named = isinstance(self.tool_choice, NamedFunction)
        choice = (
            NamedTool(type="function", function=FunctionName(name=self.tool_choice.name))
            if isinstance(self.tool_choice, NamedFunction)
            else self.tool_choice
        )
        schemas = callable_schemas(tools, choice)
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning is not None and self.reasoning.effort is not None:
            variables["reasoning_effort"] = self.reasoning.effort
        return Chat(
            messages_of(self.instructions, self.input),
            for_template(tools) if schemas else (),
            schemas,
            must_call=named or choice == "required",
            several_calls=self.parallel_tool_calls is not False and not named,
            json_schema=self._format().schema_of_content(),
            template_kwargs=variables,
            field_of={"reasoning_effort": "reasoning.effort"},
        )

    def shown_prompt(
        self, number: int, token_ids: tuple[int, ...], tokenizer: Tokenizer
    ) -> ShownPrompt:
        """Nothing of the prompt."""
        return ShownPrompt(token_ids)

    def generation_requests(self) -> list[GenerationRequest]:
        """The body as its only `GenerationRequest`, the form that all fronts share."""
        return [self._generation_request()]

    def _generation_request(self) -> GenerationRequest:
        return GenerationRequest(
            model=self.model,
            prompt=self.chat,
            prompt_field="input",
            max_tokens=self.max_output_tokens,
            max_tokens_field="max_output_tokens",
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            **fields_of(self.disagg),
            cache_salt=self.cache_salt or "",
            grammar=self._format().grammar(),
            grammar_field="text.format",
        )

    def _format(self) -> ResponseFormat:
        given = self.text.format if self.text else None
        if isinstance(given, TextFormat):
            schema = given.model_dump(by_alias=True, exclude={"type"})
            return ResponseFormat(type="json_schema", json_schema=JsonSchema(**schema))
        return ResponseFormat(type=given.type if given else "text")


def parse_responses(body: bytes) -> ResponsesRequest:
    """Check a body.

    Raises:
        RequestError: the first field that is wrong, unknown or unsupported, by name.
    """
    data = read_object(body, ResponsesRequest, NEUTRAL)
    try:
        request = validate(ResponsesRequest, data)
    except RequestError as error:
        raise RequestError(error.message, param=TAG.sub(r"\1", error.param)) from error
    if request.stream_options is not None and not request.stream:
        raise RequestError("is only allowed with stream: true", param="stream_options")
    calls = (item for item in request.input if isinstance(item, CallItem))
    check_arguments((call.arguments for call in calls), "input")
    return request
