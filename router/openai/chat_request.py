"""The body of a chat completions request."""

import dataclasses
from typing import Annotated

from pydantic import Field

from disagg.errors import RequestError
from disagg.messages.sampling import TOP_LOGPROBS_MAX
from disagg.router.generation_request import GenerationRequest
from disagg.router.openai.body import read_object, validate
from disagg.router.openai.chat_message import Message, drop_ignored
from disagg.router.openai.generation_fields import GenerationFields


class ChatRequest(GenerationFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None

    def check_together(self) -> None:
        """See ``GenerationFields.check_together``."""
        super().check_together()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("needs logprobs: true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise RequestError("differs from max_completion_tokens; set one", param="max_tokens")

    def generation_request(self) -> GenerationRequest:
        """The body as a `GenerationRequest`; see ``generation_request_of``."""
        messages = tuple(message.model_dump(exclude_none=True) for message in self.messages)
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return dataclasses.replace(
            self.generation_request_of(messages, "messages"),
            max_tokens=getattr(self, field),
            max_tokens_field=field,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


def parse_chat(body: bytes) -> ChatRequest:
    """Check a chat completions body.

    Raises:
        RequestError: the first field that is wrong, unknown or unsupported, by name.
    """
    data = read_object(body)
    drop_ignored(data.get("messages"))
    request = validate(ChatRequest, data)
    request.check_together()
    return request
