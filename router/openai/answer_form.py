"""What a request wants its answer to be: how many choices, and what is shown of each."""

from disagg.messages.frozen import dataclass


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of one answer, whole or streamed."""

    num_shown: int = 1
    """Choices of each prompt that are shown."""
    num_each: int = 1
    """Choices of each prompt that are generated, one after another in the order of all choices; the
    best are shown where they are more."""
    num_each_field: str = "n"
    """What errors about their number name."""
    num_logprobs: int | None = None
    """Of the best tokens at each position; None: no logprobs at all."""
    skip_special_tokens: bool = True
    with_token_ids: bool = False
    with_usage_field: bool = False
    """Chunks of a stream that ends with a usage chunk carry ``usage: null`` until then."""
    with_running_usage: bool = False
    """They carry what their choice has so far instead."""
