"""A checkpoint's chat template: what it knows of, and chats rendered by it."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, RequestError
from disagg.router import template_bounds
from disagg.router.chat import Chat
from disagg.router.template_bounds import CHARS_MAX, BoundError
from disagg.tls.given_file import read_given

RESERVED = frozenset(
    {"add_generation_prompt", "chat_template", "documents", "messages", "tokenize", "tools"}
)
"""Variables and arguments that a request cannot set."""
GEMMA_TOOLS = Path(__file__).parent / "message_parts" / "gemma_tools.jinja"
"""Gemma's own template with tools, which it has not."""
PLAIN_FIELDS = {"role", "content"}
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

    def __init__(
        self,
        tokenizer: Any,
        file: str = "",
        fallback: Path | None = None,
        chars_max: int = CHARS_MAX,
    ) -> None:
        """Take a tokenizer's template.

        Args:
            tokenizer: of transformers; its own template is replaced if ``file`` is given.
            file: another template, in Jinja.
            fallback: what renders chats with tools where the template knows none.
            chars_max: of a prompt, with what the template adds.

        Raises:
            ConfigError: the file cannot be read; the template does not end, or writes without end,
                for a message of one letter.
        """
        self._tokenizer = tokenizer
        self._chars_max = max(chars_max, CHARS_MAX)  # a small limit is no template's fault
        if file:
            try:
                tokenizer.chat_template = read_given(file)[0].decode()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"model.chat_template: {file}: {error}", param="model.chat_template"
                ) from error
        self._plain_text, self.text = self._text(tools=False), self._text(tools=True)
        self._fallback = ""
        if fallback is not None and self.text and not _names(self.text, "tools"):
            self._fallback = self.text = fallback.read_text(encoding="utf-8")
        self._render_plain = _plain_renderer(tokenizer, self._plain_text)
        if self.text not in ("", self._plain_text):
            _plain_renderer(tokenizer, self.text)  # for its bounds; transformers renders by it
        try:
            self.render(Chat(({"role": "user", "content": "a"},)))
        except BoundError as error:
            param = "model.chat_template" if file else "model"
            raise ConfigError(error.message, param=param) from error
        except RequestError:  # it may refuse that message for a reason of its own
            pass
        self._chars_max = chars_max

    @property
    def takes_tools(self) -> bool:
        """Whether tools are shown to the model."""
        return _names(self.text, "tools")

    def render(self, chat: Chat, *, add_generation_prompt: bool = True) -> str:
        """The prompt, ready for the assistant's answer or not.

        Raises:
            RequestError: the model has no template, it refuses the messages, takes more than it
                may (`template_bounds`), writes what no text can have, or knows nothing of something
                else.
        """
        if not self.text:
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        template_bounds.begin(self._chars_max)
        try:
            if self._render_plain is not None and _is_plain(chat):
                text = self._render_plain(
                    messages=list(chat.messages), add_generation_prompt=add_generation_prompt
                )
            else:
                text = self._render_any(chat, add_generation_prompt)
            text.encode()
            return text
        except RequestError:
            raise
        except UnicodeEncodeError as error:
            raise RequestError(
                "the chat template writes half a surrogate pair, which no text can have; "
                "see model.chat_template",
                param="messages",
            ) from error
        except Exception as error:  # templates raise whatever they like
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error

    def _render_any(self, chat: Chat, add_generation_prompt: bool) -> str:
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

    def _text(self, *, tools: bool) -> str:
        if not self._tokenizer.chat_template:
            return ""
        # A tokenizer may have a template of its own for tools.
        return str(self._tokenizer.get_chat_template(None, [{}] if tools else None))


def _is_plain(chat: Chat) -> bool:
    """Whether transformers would give its template the messages as they are, and nothing else."""
    if chat.tools or chat.template_kwargs or not chat.messages:
        return False
    return all(
        message.keys() == PLAIN_FIELDS and type(message["content"]) is str
        for message in chat.messages
    )


def _plain_renderer(tokenizer: Any, text: str) -> Callable[..., str] | None:
    """What transformers comes to for plain chats, whose wrapper takes more than the template.

    The template has bounds from now on, also where the wrapper uses it.

    Returns:
        None where it may come to something else, or where the template is none.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    own = PreTrainedTokenizerBase.apply_chat_template
    compiling = getattr(chat_template_utils, "_compile_jinja_template", None)
    if not text or compiling is None or type(tokenizer).apply_chat_template is not own:
        return None
    try:
        template = compiling(text)
        template_bounds.bound(template, text)
    except Exception:  # it is refused where it is used, with the reason
        return None
    given = {**tokenizer.special_tokens_map, "tools": None, "documents": None}
    return functools.partial(template.render, **given)


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
