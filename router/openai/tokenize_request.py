"""The bodies of ``/tokenize`` and ``/detokenize``, which are vLLM's."""

from typing import Annotated, Any

from pydantic import Field

from disagg.errors import RequestError
from disagg.router.chat import Chat
from disagg.router.openai.body import ITEMS_MAX, Strict, read_object, validate
from disagg.router.openai.chat_message import Message, check_messages, drop_ignored
from disagg.router.openai.tools import Tools, callable_schemas, for_template


class TokenizeRequest(Strict):
    """Body of ``POST /tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = Field(default=None, repr=False)
    messages: Annotated[list[Message], Field(max_length=ITEMS_MAX, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """None: those that the tokenizer adds to a prompt; a chat template writes its own."""
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    tools: Tools | None = Field(default=None, repr=False)
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, repr=False)

    @property
    def prompt_field(self) -> str:
        """Which of the two was given."""
        return "messages" if self.prompt is None else "prompt"

    def chat(self) -> Chat:
        """The messages as a chat."""
        tools = self.tools or []
        return Chat(
            tuple(message.for_template() for message in self.messages or ()),
            for_template(tools),
            callable_schemas(tools, None),
            template_kwargs=self.chat_template_kwargs or {},
        )


class DetokenizeRequest(Strict):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, repr=False)]


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Check a body.

    Raises:
        RequestError: the first field that is wrong or unknown, by name.
    """
    data = read_object(body, TokenizeRequest)
    drop_ignored(data.get("messages"))
    request = validate(TokenizeRequest, data)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give a prompt or messages", param="prompt")
    check_messages(request.messages or [])
    if request.prompt is not None:
        for name in ("tools", "chat_template_kwargs"):
            if getattr(request, name):
                raise RequestError("goes with messages", param=name)
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Check a body.

    Raises:
        RequestError: the first field that is wrong or unknown, by name.
    """
    return validate(DetokenizeRequest, read_object(body, DetokenizeRequest))
