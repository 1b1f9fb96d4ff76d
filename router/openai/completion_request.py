"""The body of a completions request."""

import dataclasses
from typing import Annotated

from pydantic import BeforeValidator, Field

from disagg.errors import RequestError
from disagg.messages.lazy import cached_property
from disagg.messages.sampling import TOP_LOGPROBS_MAX
from disagg.router.generation_request import GenerationRequest
from disagg.router.openai.answer_form import AnswerForm
from disagg.router.openai.body import ITEMS_MAX, read_object, validate
from disagg.router.openai.generation_fields import GenerationFields
from disagg.router.openai.shown_prompt import ShownPrompt
from disagg.router.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions."""


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        if len(value) > ITEMS_MAX:
            raise ValueError(f"at most {ITEMS_MAX} prompts")
        return tuple(_prompt(item) for item in value)
    return (_prompt(value),)


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    raise ValueError("must be a string, a list of token ids, or a list of either")


Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
PromptGiven = (
    Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1, max_length=ITEMS_MAX)]
)
"""As clients write it."""


class CompletionRequest(GenerationFields):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        tuple[str | tuple[int, ...], ...],
        BeforeValidator(_prompts, json_schema_input_type=PromptGiven),
        Field(repr=False),
    ]
    best_of: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    echo: bool | None = None

    @cached_property
    def form(self) -> AnswerForm:
        """What the answer is to be; with ``best_of`` more choices are generated than shown."""
        form = self.form_of(self.logprobs)
        named = "n"
        if self.best_of is not None:
            form, named = dataclasses.replace(form, num_each=self.best_of), "best_of"
        if len(self.prompt) > form.num_each:
            named = "prompt"
        return dataclasses.replace(form, num_each_field=named)

    @property
    def num_prompts(self) -> int:
        """Each has choices of its own."""
        return len(self.prompt)

    @property
    def num_echo_logprobs(self) -> int | None:
        """Of the best tokens at each place of the prompt in ``logprobs``; None: not of any."""
        return self.logprobs if self.echo else None

    def shown_prompt(
        self, number: int, token_ids: tuple[int, ...], tokenizer: Tokenizer
    ) -> ShownPrompt:
        """See ``GenerationFields``; with ``echo`` every choice begins with its prompt's text."""
        if not self.echo:
            return ShownPrompt(token_ids, self.prompt_logprobs)
        prompt = self.prompt[number]
        if isinstance(prompt, str):
            text = prompt
        elif self.form.skip_special_tokens:
            text = tokenizer.decode(token_ids)
        else:
            text = tokenizer.decode_all(token_ids)
        return ShownPrompt(
            token_ids,
            self.prompt_logprobs,
            text,
            self.num_echo_logprobs,
            echo_has_marks=isinstance(prompt, str),
        )

    def check_together(self) -> None:
        """See ``GenerationFields.check_together``."""
        super().check_together()
        form = self.form
        if form.num_each < form.num_shown:
            raise RequestError(f"is less than n={form.num_shown}", param="best_of")
        if form.num_each > form.num_shown and self.stream:
            # Which ones are the best is known when all are complete.
            raise RequestError("above n does not go with stream: true", param="best_of")

    def generation_requests(self) -> list[GenerationRequest]:
        """A `GenerationRequest` for each prompt; see ``generation_request_of``."""
        if len(self.prompt) == 1:
            return [self._generation_request(self.prompt[0], "prompt")]
        return [
            self._generation_request(prompt, f"prompt[{number}]")
            for number, prompt in enumerate(self.prompt)
        ]

    def _generation_request(
        self, prompt: str | tuple[int, ...], prompt_field: str
    ) -> GenerationRequest:
        ranks = self.form.num_each > self.form.num_shown
        wanted = [n for n in (self.prompt_logprobs, self.num_echo_logprobs) if n is not None]
        return self.generation_request_of(
            prompt,
            prompt_field,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            least_max_tokens=0 if self.echo or self.prompt_logprobs is not None else 1,
            num_logprobs=0 if self.logprobs is None and ranks else self.logprobs,
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
