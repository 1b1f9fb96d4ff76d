"""One message of a chat."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from disagg.errors import RequestError
from disagg.router.openai.body import Strict

MESSAGE_IGNORED = ("annotations", "audio", "function_call", "refusal", "tool_calls")
"""What clients echo of an assistant's message; only empty ones pass."""


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


class Message(Strict):
    """One chat message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content), Field(repr=False)]
    name: str | None = None


def drop_ignored(messages: object) -> None:
    """Take the fields that are ignored out of messages not yet validated.

    Raises:
        RequestError: one of them is not empty, by name.
    """
    message: Any
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in MESSAGE_IGNORED if isinstance(message, dict) else ():
            if message.pop(name, None):
                raise RequestError("is not supported", param=f"messages[{index}].{name}")
