"""What of its prompt an answer shows."""

from dataclasses import dataclass, field

from disagg.messages.sampling import TokenLogprobs
from disagg.router.text_stream import Piece


@dataclass(slots=True)
class ShownPrompt:
    """A prompt as its choices show it; its log-probabilities come with the first piece of them.

    Attributes:
        token_ids: of the prompt.
        num_logprobs: of the best tokens in the field ``prompt_logprobs``; None: there is no field.
        echo: text that every choice begins with; None where it does not.
        echo_has_marks: that text is the client's own, with the special tokens that stand in it.
        num_echo_logprobs: of the best tokens in the logprobs of that text.
        logprobs: of each token; the first one has none.
    """

    token_ids: tuple[int, ...] = field(repr=False)
    num_logprobs: int | None = None
    echo: str | None = field(default=None, repr=False)
    num_echo_logprobs: int | None = None
    echo_has_marks: bool = False
    logprobs: tuple[TokenLogprobs | None, ...] = field(default=(), repr=False)

    def take(self, piece: Piece) -> None:
        """Keep what a piece says of the prompt."""
        if piece.prompt_logprobs:
            self.logprobs = piece.prompt_logprobs
