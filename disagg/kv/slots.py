"""How many slots sequences get: one for each token, and some behind them for drafts."""

from collections.abc import Hashable, Mapping

from disagg.errors import InvariantViolation
from disagg.kv.sequence import SequenceState, sequence_of


class Slots:
    """Slots of the sequences of one coordinator, none past the longest sequence.

    Args:
        sequences: those that have begun; one that has not raises InvariantViolation.
        num_lookahead_tokens: drafts of the tokens that follow that allocations have room for.
        max_model_tokens: longest sequence.
    """

    def __init__(
        self,
        sequences: Mapping[Hashable, SequenceState],
        num_lookahead_tokens: int,
        max_model_tokens: int,
    ) -> None:
        self._sequences = sequences
        self._num_lookahead_tokens = num_lookahead_tokens
        self._max_model_tokens = max_model_tokens

    def total(self, num_tokens: int) -> int:
        """Slots of a sequence of so many tokens, those of drafts behind them included."""
        return min(num_tokens + self._num_lookahead_tokens, self._max_model_tokens)

    def num_for_drafts(self, key: Hashable) -> int:
        """Slots there are behind the scheduled tokens, of ``num_lookahead_tokens`` at most."""
        sequence = sequence_of(self._sequences, key)
        num_slots = min(sequence.room_end, self._max_model_tokens) - sequence.num_scheduled
        return min(num_slots, self._num_lookahead_tokens)

    def accept_drafts(self, key: Hashable, num_tokens: int) -> None:
        """So many drafts behind the scheduled tokens were right: they are scheduled tokens too.

        The step that computed them has completed. The others' slots are written again.

        Raises:
            InvariantViolation: there are no slots for so many.
        """
        if num_tokens > self.num_for_drafts(key):
            raise InvariantViolation(f"{key!r} accepts drafts that have no slots")
        sequence_of(self._sequences, key).num_scheduled += num_tokens
