"""The body of a completions request."""

import dataclasses
from typing import Annotated

from pydantic import BeforeValidator, Field

from disagg.router.generation_request import GenerationRequest
from disagg.router.openai.body import read_object, validate
from disagg.router.openai.generation_fields import GenerationFields

COMPLETION_LOGPROBS_MAX = 5
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions."""


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


class CompletionRequest(GenerationFields):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt), Field(repr=False)]
    logprobs: Annotated[int, Field(ge=0, le=COMPLETION_LOGPROBS_MAX)] | None = None

    def generation_request(self) -> GenerationRequest:
        """The body as a `GenerationRequest`; see ``generation_request_of``."""
        return dataclasses.replace(
            self.generation_request_of(self.prompt, "prompt"),
            default_max_tokens=COMPLETION_MAX_TOKENS,
            num_logprobs=self.logprobs,
        )


def parse_completion(body: bytes) -> CompletionRequest:
    """Check a completions body.

    Raises:
        RequestError: the first field that is wrong, unknown or unsupported, by name.
    """
    request = validate(CompletionRequest, read_object(body))
    request.check_together()
    return request
