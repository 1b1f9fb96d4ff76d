"""The body of a chat completions request."""

from typing import Annotated, Any

from pydantic import Field

from disagg.errors import RequestError
from disagg.messages.lazy import cached_property
from disagg.messages.sampling import TOP_LOGPROBS_MAX
from disagg.router.chat import Chat
from disagg.router.generation_request import GenerationRequest
from disagg.router.openai.answer_form import AnswerForm
from disagg.router.openai.body import ITEMS_MAX, read_object, validate
from disagg.router.openai.chat_message import Message, check_messages, drop_ignored
from disagg.router.openai.generation_fields import GenerationFields
from disagg.router.openai.tools import (
    NamedTool,
    ToolChoice,
    Tools,
    callable_schemas,
    for_template,
)


class ChatRequest(GenerationFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(max_length=ITEMS_MAX, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    # Of a default that could change pydantic makes a deep copy for every request.
    tools: Tools = Field(default_factory=list, repr=False)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)

    def check_together(self) -> None:
        """See ``GenerationFields.check_together``."""
        super().check_together()
        check_messages(self.messages)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("needs logprobs: true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise RequestError("differs from max_completion_tokens; set one", param="max_tokens")

    @cached_property
    def chat(self) -> Chat:
        """The messages, and what their answer must be.

        Raises:
            RequestError: tools, choice or response format do not fit together.
        """
        variables = dict(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        schemas = callable_schemas(self.tools, self.tool_choice)
        return Chat(
            tuple(message.for_template() for message in self.messages),
            # Tools that must not be called are not shown to the model at all.
            for_template(self.tools) if schemas else (),
            schemas,
            must_call=self.tool_choice not in (None, "none", "auto"),
            several_calls=self.parallel_tool_calls is not False
            and not isinstance(self.tool_choice, NamedTool),
            json_schema=(
                self.response_format.schema_of_content() if self.response_format else None
            ),
            template_kwargs=variables,
            field_of={"reasoning_effort": "reasoning_effort"},
        )

    @cached_property
    def form(self) -> AnswerForm:
        """What the answer is to be."""
        return self.form_of((self.top_logprobs or 0) if self.logprobs else None)

    def generation_requests(self) -> list[GenerationRequest]:
        """The only `GenerationRequest` of the chat; see ``generation_request_of``."""
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        request = self.generation_request_of(
            self.chat,
            "messages",
            max_tokens=getattr(self, field),
            max_tokens_field=field,
            num_logprobs=self.form.num_logprobs,
        )
        return [request]


def parse_chat(body: bytes) -> ChatRequest:
    """Check a chat completions body.

    Raises:
        RequestError: the first field that is wrong, unknown or unsupported, by name.
    """
    data = read_object(body, ChatRequest)
    drop_ignored(data.get("messages"))
    for name in ("tools", "chat_template_kwargs"):
        if name in data and data[name] is None:
            del data[name]
    request = validate(ChatRequest, data)
    request.check_together()
    return request
