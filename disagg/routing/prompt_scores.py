"""Log-probabilities of one request's prompt on their way to its client: each of them once."""

from collections.abc import Sequence

from disagg.errors import ProtocolError
from disagg.messages.sampling import TokenLogprobs


class PromptScores:
    """What the worker that computes the prompt sends of it, in order, until it is complete.

    A generation that ends before has sent a part: the next one begins anew, and its own are taken,
    as numbers of two workers may differ in their last bits. Complete ones are kept.

    Args:
        num_tokens: of the prompt; the first one has no log-probability.
        num_wanted: as ``SamplingParams.num_prompt_logprobs``.
    """

    def __init__(self, num_tokens: int, num_wanted: int | None) -> None:
        self._num_tokens = num_tokens
        self._num_wanted = num_wanted
        self._found: list[TokenLogprobs | None] = [None]
        self.taken = num_wanted is None
        """They were handed on, or are not wanted at all."""

    @property
    def complete(self) -> bool:
        """Nothing is lacking."""
        return self.taken or len(self._found) == self._num_tokens

    @property
    def num_wanted(self) -> int | None:
        """What is to be requested of the next generation; None where nothing is lacking."""
        return None if self.complete else self._num_wanted

    def restart(self) -> None:
        """A new generation begins."""
        if not self.complete:
            self._found = [None]

    def forget(self) -> None:
        """Another checkpoint computes the prompt: nothing that was found holds for it."""
        if not self.taken:
            self._found = [None]

    def accept(self, position: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take some of a prompt's tokens, from a position on.

        Raises:
            ProtocolError: they were not requested, or are not those that come next.
        """
        if self._num_wanted is None:
            raise ProtocolError("prompt logprobs came that were not requested")
        if position != len(self._found) or position + len(logprobs) > self._num_tokens:
            raise ProtocolError(
                f"prompt logprobs came for {len(logprobs)} tokens from position {position}, "
                f"not from {len(self._found)} of {self._num_tokens}"
            )
        self._found += logprobs

    def take(self) -> tuple[TokenLogprobs | None, ...]:
        """Hand them on: all of them the first time, then none."""
        if self.taken:
            return ()
        self.taken = True
        found, self._found = tuple(self._found), []
        return found
