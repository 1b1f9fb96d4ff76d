"""The fields that bodies of completions and of chat completions share."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from disagg.errors import RequestError
from disagg.messages.sampling import STOP_TOKENS_MAX, TOP_LOGPROBS_MAX
from disagg.router.generation_request import (
    CACHE_SALT_CHARS_MAX,
    PENALTY_MAX,
    REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN,
    STOP_CHARS_MAX,
    STOP_STRINGS_MAX,
    TEMPERATURE_MAX,
    GenerationRequest,
    Prompt,
)
from disagg.router.openai.answer_form import AnswerForm
from disagg.router.openai.body import Strict
from disagg.router.openai.disagg_fields import DisaggFields, fields_of
from disagg.router.openai.logit_bias import LogitBias
from disagg.router.openai.response_format import ResponseFormat
from disagg.router.openai.shown_prompt import ShownPrompt
from disagg.router.openai.stream_options import StreamOptions
from disagg.router.tokenizer import Tokenizer


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and len(value) > STOP_STRINGS_MAX:
        raise ValueError(f"at most {STOP_STRINGS_MAX} strings")
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("must be a string or a list of strings")


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, list) and len(value) > STOP_TOKENS_MAX:
        raise ValueError(f"at most {STOP_TOKENS_MAX} ids")
    if isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    raise ValueError("must be a list of token ids")


StopString = Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]
StopGiven = StopString | Annotated[list[StopString], Field(max_length=STOP_STRINGS_MAX)] | None
StopTokensGiven = (
    Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=STOP_TOKENS_MAX)] | None
)
"""As clients write them."""
Penalty = Annotated[float, Field(ge=-PENALTY_MAX, le=PENALTY_MAX)]


class GenerationFields(Strict):
    """What both kinds of body say about how to generate and how to show it."""

    model: str
    n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=REPETITION_PENALTY_MIN, le=REPETITION_PENALTY_MAX)] | None
    ) = None
    logit_bias: LogitBias = Field(default=(), repr=False)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop, json_schema_input_type=StopGiven)] = (
        Field(default=(), repr=False)
    )
    stop_token_ids: Annotated[
        tuple[int, ...],
        BeforeValidator(_stop_token_ids, json_schema_input_type=StopTokensGiven),
    ] = Field(default=(), repr=False)
    prompt_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    disagg: DisaggFields | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=CACHE_SALT_CHARS_MAX)] | None = Field(
        default=None, repr=False
    )
    response_format: ResponseFormat | None = None

    @property
    def num_prompts(self) -> int:
        """A chat is one."""
        return 1

    def form_of(self, num_logprobs: int | None) -> AnswerForm:
        """What the answer is to be, with so many logprobs as the endpoint's own fields want."""
        num_shown = 1 if self.n is None else self.n
        return AnswerForm(
            num_shown=num_shown,
            num_each=num_shown,
            num_logprobs=num_logprobs,
            skip_special_tokens=self.skip_special_tokens is not False,
            with_token_ids=bool(self.return_token_ids),
            with_usage_field=self.include_usage,
            with_running_usage=self.include_usage and self._wants_running_usage,
        )

    @property
    def _wants_running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_together(self) -> None:
        """Check fields that are right each for itself.

        Raises:
            RequestError: the field that does not go with another, by name.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("is only allowed with stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("does not go with stream: true", param="prompt_logprobs")

    def shown_prompt(
        self, number: int, token_ids: tuple[int, ...], tokenizer: Tokenizer
    ) -> ShownPrompt:
        """What the answer shows of one of its prompts, which has these tokens."""
        return ShownPrompt(token_ids, self.prompt_logprobs)

    def generation_request_of(
        self, prompt: Prompt, prompt_field: str, **own: Any
    ) -> GenerationRequest:
        """These fields as a `GenerationRequest`, the form that both front ends share.

        Args:
            prompt: of it.
            prompt_field: what errors about it name.
            own: fields that the endpoint has in place of these, or beside them.

        Raises:
            RequestError: the response format has no schema, or one that would not count.
        """
        fields: dict[str, Any] = dict(
            model=self.model,
            prompt=prompt,
            prompt_field=prompt_field,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            stop=self.stop,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=self.stop_token_ids,
            num_prompt_logprobs=self.prompt_logprobs,
            least_max_tokens=1 if self.prompt_logprobs is None else 0,
            ignore_eos=bool(self.ignore_eos),
            priority=self.priority or 0,
            **fields_of(self.disagg),
            add_special_tokens=self.add_special_tokens,
            cache_salt=self.cache_salt or "",
            grammar=self.response_format.grammar() if self.response_format else "",
        )
        return GenerationRequest(**(fields | own))
