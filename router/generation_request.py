"""What a front end wants generated, before the tokenizer has seen it."""

import math
from dataclasses import dataclass, field

from disagg.errors import RequestError
from disagg.messages.sampling import GRAMMAR_BYTES_MAX, STOP_TOKENS_MAX, TOP_LOGPROBS_MAX
from disagg.router.chat import Chat

STOP_STRINGS_MAX = 16
"""OpenAI has 4; tasks of lm-eval have more."""
STOP_CHARS_MAX = 1000
TEMPERATURE_MAX = 2.0
PENALTY_MAX = 2.0
"""Of presence and frequency; the least is its negative, as OpenAI has it."""
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.1, 10.0
LOGIT_BIAS_MAX = 100.0
LOGIT_BIAS_TOKENS_MAX = 1024
CACHE_SALT_CHARS_MAX = 256
SLO_MS_MAX = 3_600_000

Prompt = str | tuple[int, ...] | Chat
"""Text, token ids, or a chat."""


@dataclass(slots=True)  # frozen it would take three times as long to make
class GenerationRequest:
    """One generation as its client requests it, over HTTP or gRPC. None means the default.

    Nobody changes it.
    """

    model: str
    prompt: Prompt = field(repr=False)
    prompt_field: str
    """What errors about the prompt name: ``prompt``, ``messages`` or ``token_ids``."""
    max_tokens: int | None
    max_tokens_field: str = "max_tokens"
    least_max_tokens: int = 1
    """0 where the answer shows something of the prompt."""
    default_max_tokens: int | None = None
    """None: what the context leaves."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    """(token id, bias), by token id."""
    seed: int | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    """See ``SamplingParams``."""
    prompt_logprobs_field: str = "prompt_logprobs"
    """What errors about them name."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = field(default=(), repr=False)
    """Besides those of the checkpoint, which ``ignore_eos`` leaves out."""
    stop: tuple[str, ...] = field(default=(), repr=False)
    ignore_eos: bool = False
    add_special_tokens: bool | None = None
    """To the prompt's text; None: to a plain one, and not to what a chat template has written."""
    priority: int = 0
    """See ``NewRequest``."""
    ttft_ms: int | None = None
    tpot_ms: float | None = None
    shed: bool | None = None
    """See ``Slo``; None: as the deployment has it."""
    hand_over: bool | None = None
    """See ``NewRequest``."""
    cache_salt: str = field(default="", repr=False)
    grammar: str = field(default="", repr=False)
    """See ``SamplingParams.grammar``; "": the answer is free."""
    grammar_field: str = "response_format"

    def check(self) -> None:
        """Check every field that needs neither tokenizer nor fleet.

        Raises:
            RequestError: the first field that is wrong, by name.
        """
        if not (self.prompt.messages if isinstance(self.prompt, Chat) else self.prompt):
            raise RequestError("must not be empty", param=self.prompt_field)
        if self.max_tokens is not None and self.max_tokens < self.least_max_tokens:
            raise RequestError(
                f"must be at least {self.least_max_tokens}", param=self.max_tokens_field
            )
        if self.min_tokens < 0:
            raise RequestError("must not be negative", param="min_tokens")
        if self.max_tokens is not None:
            self.check_min_tokens(self.max_tokens)
        if len(self.stop_token_ids) > STOP_TOKENS_MAX:
            raise RequestError(f"at most {STOP_TOKENS_MAX} ids", param="stop_token_ids")
        _range("temperature", self.temperature, 0.0, TEMPERATURE_MAX)
        _range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("must be above 0", param="top_p")
        if self.top_k is not None and not -1 <= self.top_k < 2**31:
            raise RequestError("must be -1 or 0 (no limit) or positive", param="top_k")
        _range("min_p", self.min_p, 0.0, 1.0)
        _range("presence_penalty", self.presence_penalty, -PENALTY_MAX, PENALTY_MAX)
        _range("frequency_penalty", self.frequency_penalty, -PENALTY_MAX, PENALTY_MAX)
        _range(
            "repetition_penalty",
            self.repetition_penalty,
            REPETITION_PENALTY_MIN,
            REPETITION_PENALTY_MAX,
        )
        if len(self.logit_bias) > LOGIT_BIAS_TOKENS_MAX:
            raise RequestError(f"at most {LOGIT_BIAS_TOKENS_MAX} tokens", param="logit_bias")
        for _, bias in self.logit_bias:
            _range("logit_bias", bias, -LOGIT_BIAS_MAX, LOGIT_BIAS_MAX)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise RequestError("must fit 64 bits", param="seed")
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= TOP_LOGPROBS_MAX:
            raise RequestError(f"at most {TOP_LOGPROBS_MAX}", param="logprobs")
        if not 0 <= (self.num_prompt_logprobs or 0) <= TOP_LOGPROBS_MAX:
            raise RequestError(f"0 to {TOP_LOGPROBS_MAX}", param=self.prompt_logprobs_field)
        if len(self.stop) > STOP_STRINGS_MAX:
            raise RequestError(f"at most {STOP_STRINGS_MAX} strings", param="stop")
        if any(not text for text in self.stop):
            raise RequestError("must not contain an empty string", param="stop")
        if any(len(text) > STOP_CHARS_MAX for text in self.stop):
            raise RequestError(f"at most {STOP_CHARS_MAX} characters each", param="stop")
        _range("disagg.ttft_ms", self.ttft_ms, 1, SLO_MS_MAX)
        _range("disagg.tpot_ms", self.tpot_ms, 0.001, SLO_MS_MAX)
        check_cache_salt(self.cache_salt)
        if len(self.grammar.encode()) > GRAMMAR_BYTES_MAX:
            raise RequestError(f"at most {GRAMMAR_BYTES_MAX} bytes", param=self.grammar_field)
        if self.grammar and self.ignore_eos:
            # Where the grammar is complete, nothing but the end may follow.
            raise RequestError(f"does not go with {self.grammar_field}", param="ignore_eos")
        if self.grammar and self.min_tokens:
            raise RequestError(f"does not go with {self.grammar_field}", param="min_tokens")

    def check_min_tokens(self, max_tokens: int) -> None:
        """Raise RequestError where no answer of so many tokens has the least number of them."""
        if self.min_tokens > max_tokens:
            raise RequestError(
                f"{self.min_tokens} are more than {self.max_tokens_field}={max_tokens}",
                param="min_tokens",
            )


def check_cache_salt(salt: str) -> None:
    """Refuse a salt that is too long to be hashed with every prompt.

    Raises:
        RequestError: naming ``cache_salt``.
    """
    if len(salt) > CACHE_SALT_CHARS_MAX:
        raise RequestError(f"at most {CACHE_SALT_CHARS_MAX} characters", param="cache_salt")


def _range(param: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise RequestError(f"must be between {low:g} and {high:g}", param=param)
