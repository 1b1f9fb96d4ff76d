"""What one engine step emitted: worker to router."""

from dataclasses import field
from enum import StrEnum

from disagg.messages.frozen import dataclass
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import TokenLogprobs


class FinishReason(StrEnum):
    """Why a request is complete (OpenAI's names); NONE while it is not."""

    NONE = ""
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New tokens of one sequence. The router accepts them by generation and position.

    Nobody changes one: it is hashed and shared.
    """

    key: RequestKey
    position: int
    """Absolute index in the sequence of the first of ``token_ids``."""
    token_ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Parallel to ``token_ids``, or empty when not requested."""
    finish_reason: FinishReason = FinishReason.NONE


PROMPT_LOGPROBS_PER_MESSAGE_MAX = 1 << 16
"""Numbers in the prompt log-probabilities of one `StepOutputs`: less than a megabyte."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of some of a prompt's own tokens, each with its rank.

    The first token of a prompt has none. They come in order, and before the generation's first
    token from whoever computed the prompt.
    """

    key: RequestKey
    position: int
    """Absolute index in the sequence of the first of them."""
    logprobs: tuple[TokenLogprobs, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """All tokens of a step for one router, and before them what it says of prompts; never empty."""

    outputs: tuple[SequenceOutput, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
