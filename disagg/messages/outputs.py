"""What one engine step emitted: worker to router."""

from dataclasses import dataclass, field
from enum import StrEnum

from disagg.messages.identity import RequestKey
from disagg.messages.sampling import TokenLogprobs


class FinishReason(StrEnum):
    """Why a request is complete (OpenAI's names); NONE while it is not."""

    NONE = ""
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New tokens of one sequence. The router accepts them by generation and position."""

    key: RequestKey
    position: int
    """Absolute index in the sequence of the first of ``token_ids``."""
    token_ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Parallel to ``token_ids``, or empty when not requested."""
    finish_reason: FinishReason = FinishReason.NONE


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """All tokens that one engine step emitted."""

    outputs: tuple[SequenceOutput, ...]
