"""A checkpoint's chat template: what it knows of, and chats rendered by it."""

import json
import re
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, RequestError
from disagg.router.chat import Chat

RESERVED = frozenset(
    {"add_generation_prompt", "chat_template", "documents", "messages", "tokenize", "tools"}
)
"""Variables and arguments that a request cannot set."""
GEMMA_TOOLS = Path(__file__).parent / "message_parts" / "gemma_tools.jinja"
"""Gemma's own template with tools, which it has not."""
TEXT_ARGUMENTS = re.compile(
    r"""arguments['"]?\]?\s*\+|\+\s*[\w.\['"\]]*arguments['"]?\]?\s*-?\}\}"""
)
"""Templates that add a call's arguments to text (DeepSeek's) take them as text; others as an
object."""


class ChatTemplate:
    """Renders chats by the template of a ``transformers`` tokenizer.

    Attributes:
        text: of the template for requests with tools; "" where there is none at all.
    """

    def __init__(self, tokenizer: Any, file: str = "", fallback: Path | None = None) -> None:
        """Take a tokenizer's template.

        Args:
            tokenizer: of transformers; its own template is replaced if ``file`` is given.
            file: another template, in Jinja.
            fallback: what renders chats with tools where the template knows none.

        Raises:
            ConfigError: the file cannot be read.
        """
        self._tokenizer = tokenizer
        if file:
            try:
                tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"model.chat_template: {file}: {error}", param="model.chat_template"
                ) from error
        self._plain_text, self.text = self._text(tools=False), self._text(tools=True)
        self._fallback = ""
        if fallback is not None and self.text and not _names(self.text, "tools"):
            self._fallback = self.text = fallback.read_text(encoding="utf-8")

    @property
    def takes_tools(self) -> bool:
        """Whether tools are shown to the model."""
        return _names(self.text, "tools")

    def render(self, chat: Chat, *, add_generation_prompt: bool = True) -> str:
        """The prompt, ready for the assistant's answer or not.

        Raises:
            RequestError: the model has no template, it refuses the messages, or it knows nothing
                of something else.
        """
        if not self.text:
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        has_tools = bool(chat.tools) or any(
            message["role"] == "tool" or message.get("tool_calls") for message in chat.messages
        )
        text = self.text if has_tools else self._plain_text
        if chat.tools and not _names(text, "tools"):
            raise RequestError(
                "the checkpoint's chat template has no tools; see model.chat_template",
                param="tools",
            )
        for name in chat.template_kwargs:
            param = chat.field_of.get(name, f"chat_template_kwargs.{name}")
            if name in RESERVED or not _names(text, name):
                what = "cannot be set" if name in RESERVED else "is unknown to the chat template"
                raise RequestError(what, param=param)
        messages = list(chat.messages)
        if has_tools and TEXT_ARGUMENTS.search(text):  # else there are no arguments
            messages = [_arguments_as_text(message) for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=list(chat.tools) or None,
                    chat_template=text,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **chat.template_kwargs,
                )
            )
        except Exception as error:  # templates raise whatever they like
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error

    def _text(self, *, tools: bool) -> str:
        if not self._tokenizer.chat_template:
            return ""
        # A tokenizer may have a template of its own for tools.
        return str(self._tokenizer.get_chat_template(None, [{}] if tools else None))


def _names(text: str, variable: str) -> bool:
    return re.search(rf"(?<![\w.'\"]){re.escape(variable)}\b", text) is not None


def _arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [
        call
        | {
            "function": call["function"]
            | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
        }
        for call in calls
    ]
    return message | {"tool_calls": texts}
