"""The items of a ``/v1/responses`` request, and the messages they make."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from disagg.router.openai.body import ITEMS_MAX, Strict
from disagg.router.openai.chat_message import arguments_object

TEXT_TYPES = ("input_text", "output_text", "reasoning_text", "text")


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in TEXT_TYPES:
            raise ValueError("only parts of text are supported")
        if not isinstance(part.get("text"), str):
            raise ValueError("a text part has a string 'text'")
        if set(part) - {"type", "text", "annotations", "logprobs"}:
            raise ValueError("a text part has nothing but 'type' and 'text'")
        texts.append(part["text"])
    return "".join(texts)


class PartOfText(Strict):
    """A part of what is said, as clients write it."""

    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


Words = Annotated[str, BeforeValidator(_text, json_schema_input_type=str | list[PartOfText])]


class _Item(Strict):
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    """A message."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Words = Field(repr=False)


class CallItem(_Item):
    """A call that an answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[
        dict[str, Any],
        BeforeValidator(arguments_object, json_schema_input_type=str),
        Field(repr=False),
    ]


class OutputItem(_Item):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Words = Field(repr=False)


class ReasoningItem(_Item):
    """What an answer thought."""

    type: Literal["reasoning"]
    content: Words | None = Field(default=None, repr=False)
    summary: list[Any] = Field(default=[], repr=False)
    encrypted_content: None = None


Item = Annotated[MessageItem | CallItem | OutputItem | ReasoningItem, Field(discriminator="type")]


def as_items(value: object) -> object:
    """A request's input as a list of items that all have a type."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    if len(value) > ITEMS_MAX:
        raise ValueError(f"at most {ITEMS_MAX} items")
    return [
        {"type": "message"} | item if isinstance(item, dict) and "role" in item else item
        for item in value
    ]


def messages_of(instructions: str | None, items: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Messages for the chat template: what an answer thought, said and called is one of them."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    open_answer: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, OutputItem):
            open_answer = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            open_answer = None
            messages.append({"role": item.role, "content": item.content})
            continue
        begins = open_answer is None or not (
            isinstance(item, CallItem)
            or (isinstance(item, MessageItem) and set(open_answer) == {"role", *THOUGHT})
        )
        if open_answer is None or begins:
            open_answer = {"role": "assistant", "content": None}
            messages.append(open_answer)
        _add(open_answer, item)
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return tuple(messages)


THOUGHT = ("content", "reasoning_content", "thinking")
"""What a message has that has only thought so far."""


def _add(message: dict[str, Any], item: MessageItem | CallItem | ReasoningItem) -> None:
    if isinstance(item, ReasoningItem):
        message["reasoning_content"] = message["thinking"] = item.content or ""
    elif isinstance(item, MessageItem):
        message["content"] = item.content
    else:
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
        if message["content"]:
            message.pop("thinking", None)  # gpt-oss's template has one of the two beside calls
