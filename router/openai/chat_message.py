"""One message of a chat."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from disagg.errors import RequestError
from disagg.router.openai.body import ITEMS_MAX, Strict, exceeds

MESSAGE_IGNORED = ("annotations", "audio", "function_call", "refusal")
"""What clients echo of an assistant's message; only empty ones pass."""

CALLS_MAX = 1024
"""Of one message."""
ROLE_OF = {"reasoning_content": "assistant", "tool_calls": "assistant", "tool_call_id": "tool"}


class TextPart(Strict):
    """A part of a message's content, as clients write it."""

    type: Literal["text"]
    text: str


ContentGiven = str | Annotated[list[TextPart], Field(min_length=1)] | None


def _content(value: object) -> str | None:
    if value is None or isinstance(value, str):
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


def arguments_object(value: object) -> dict[str, Any]:
    """The arguments of a call, of their text; ValueError where that is none of a JSON object.

    It is read as bodies are: what no UTF-8 text can have (half a surrogate pair), no prompt can.
    """
    try:
        arguments = from_json(value, allow_inf_nan=False) if isinstance(value, str) else None
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("must be the text of a JSON object")
    return arguments


def check_arguments(of_calls: Iterable[dict[str, Any]], param: str) -> None:
    """Raise RequestError where the arguments of all calls of a body have too many values."""
    if exceeds(list(of_calls), ITEMS_MAX):
        raise RequestError(f"at most {ITEMS_MAX} values in arguments of calls", param=param)


class CalledFunction(Strict):
    """What a call in an assistant's message called."""

    name: str
    arguments: Annotated[
        dict[str, Any],
        BeforeValidator(arguments_object, json_schema_input_type=str),
        Field(repr=False),
    ]


class ToolCall(Strict):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, exclude=True)
    """Some clients echo it from a stream; it says nothing."""


class Message(Strict):
    """One chat message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None,
        BeforeValidator(_content, json_schema_input_type=ContentGiven),
        Field(repr=False),
    ] = None
    name: str | None = None
    tool_calls: (
        Annotated[list[ToolCall], Field(min_length=1, max_length=CALLS_MAX, fail_fast=True)] | None
    ) = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(default=None, repr=False)

    def check_together(self, param: str) -> None:
        """Check which fields the role has.

        Raises:
            RequestError: one that is lacking or too much; ``param`` names the message.
        """
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise RequestError("is required", param=f"{param}.content")
        if self.role == "tool" and self.tool_call_id is None:
            raise RequestError("is required of role tool", param=f"{param}.tool_call_id")
        for name, role in ROLE_OF.items():
            if getattr(self, name) is not None and self.role != role:
                raise RequestError(f"goes with role {role} only", param=f"{param}.{name}")

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: content is there, if None."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls is not None:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        if self.reasoning_content and not (self.tool_calls and self.content):
            message["thinking"] = self.reasoning_content  # gpt-oss's name for it
        return message


def check_messages(messages: list[Message]) -> None:
    """Check the messages of a body that are right each for itself.

    Raises:
        RequestError: see `Message.check_together` and `check_arguments`.
    """
    for index, message in enumerate(messages):
        message.check_together(f"messages[{index}]")
    calls = (call for message in messages for call in message.tool_calls or ())
    check_arguments((call.function.arguments for call in calls), "messages")


def drop_ignored(messages: object) -> None:
    """Take the fields that are ignored out of messages not yet validated.

    Raises:
        RequestError: one of them is not empty, by name.
    """
    message: Any
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        if message.get("type") == "text":  # as lm-eval has it
            del message["type"]
        for name in MESSAGE_IGNORED:
            if message.pop(name, None):
                raise RequestError("is not supported", param=f"messages[{index}].{name}")
        if message.get("tool_calls") == []:
            del message["tool_calls"]
