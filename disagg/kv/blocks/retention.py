"""What of a prefix stays findable after it has left the window of those who computed it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from disagg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Retention:
    """Positions at which sliding windows, chunks and linear states are kept for later hits.

    Full attention keeps every block in any case. What a live sequence still sees can always be
    found, and so can what it saw when it ended, until it is evicted.

    Attributes:
        interval_tokens: None keeps every block (dense). 0 keeps what a query sees at the end of
            the prompt (where a repeated or longer prompt resumes) and where a known prefix was
            left (where other prompts will leave it too). n keeps every n tokens besides.
    """

    interval_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.interval_tokens is not None and self.interval_tokens < 0:
            raise ConfigError("an interval must not be negative", param="interval_tokens")

    @property
    def is_dense(self) -> bool:
        """Whether blocks are kept findable at every boundary."""
        return self.interval_tokens is None

    def positions(
        self, chosen: Iterable[int], first: int, last: int, alignment_tokens: int
    ) -> Sequence[int]:
        """Hit lengths in ``first .. last`` to keep: the chosen and the regular ones."""
        found = {place for place in chosen if first <= place <= last}
        if self.interval_tokens:
            every = self.interval_tokens
            found.update(every * n for n in range(-(-first // every), last // every + 1))
        return sorted({place - place % alignment_tokens for place in found})
