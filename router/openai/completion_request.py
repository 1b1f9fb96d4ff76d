"""The body of a completions request."""

import dataclasses
from typing import Annotated

from pydantic import BeforeValidator, Field

from disagg.messages.sampling import TOP_LOGPROBS_MAX
from disagg.router.generation_request import GenerationRequest
from disagg.router.openai.body import read_object, validate
from disagg.router.openai.generation_fields import GenerationFields
from disagg.router.openai.shown_prompt import ShownPrompt
from disagg.router.tokenizer import Tokenizer

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
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    echo: bool | None = None

    @property
    def num_echo_logprobs(self) -> int | None:
        """Of the best tokens at each place of the prompt in ``logprobs``; None: not of any."""
        return self.logprobs if self.echo else None

    def shown_prompt(self, token_ids: tuple[int, ...], tokenizer: Tokenizer) -> ShownPrompt:
        """See ``GenerationFields``; with ``echo`` the answer's text begins with the prompt's."""
        if not self.echo:
            return ShownPrompt(token_ids, self.prompt_logprobs)
        text = self.prompt if isinstance(self.prompt, str) else tokenizer.decode(token_ids)
        return ShownPrompt(token_ids, self.prompt_logprobs, text, self.num_echo_logprobs)

    def generation_request(self) -> GenerationRequest:
        """The body as a `GenerationRequest`; see ``generation_request_of``."""
        request = self.generation_request_of(self.prompt, "prompt")
        wanted = [n for n in (self.prompt_logprobs, self.num_echo_logprobs) if n is not None]
        return dataclasses.replace(
            request,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            least_max_tokens=0 if self.echo else request.least_max_tokens,
            num_logprobs=self.logprobs,
            num_prompt_logprobs=max(wanted, default=None),
            prompt_logprobs_field="logprobs" if self.prompt_logprobs is None else "prompt_logprobs",
        )


def parse_completion(body: bytes) -> CompletionRequest:
    """Check a completions body.

    Raises:
        RequestError: the first field that is wrong, unknown or unsupported, by name.
    """
    request = validate(CompletionRequest, read_object(body, CompletionRequest))
    request.check_together()
    return request
