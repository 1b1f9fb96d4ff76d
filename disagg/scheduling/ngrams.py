"""Where the last tokens of a sequence stood before: what followed there may follow again."""

from collections.abc import Sequence

SIZES = (3, 2)
"""Tokens that must have stood together, the longer ones first. A single one says little of what
follows it, and the step that computes a wrong draft has computed it for nothing."""
NEW_TOKENS_MAX = 1024
"""Tokens that a look-up takes in at most, a few milliseconds: a long prompt takes several."""


class NgramIndex:
    """Of one sequence the place behind each of its n-grams, the last one that a token follows.

    It takes about 200 bytes of host memory per token, less where n-grams come again.
    """

    def __init__(self) -> None:
        self._ends: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._num_indexed = 0

    def draft(self, token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """What followed where the last tokens stood before: so many tokens, or none at all.

        Args:
            token_ids: all of the sequence; a later call's begin with an earlier one's.
            num_tokens: of the draft, at least 1. It runs on into itself, as in a repetition.
        """
        self._take_in(token_ids)
        num_known = len(token_ids)
        for size, ends in zip(SIZES, self._ends, strict=True):
            number = 0  # of the n-gram: takes less memory than its tuple
            for token_id in token_ids[-size:]:
                number = number << 32 | token_id
            first = ends.get(number)
            if first is not None:
                draft: list[int] = []
                for at in range(first, first + num_tokens):
                    draft.append(token_ids[at] if at < num_known else draft[at - num_known])
                return tuple(draft)
        return ()

    def _take_in(self, token_ids: Sequence[int]) -> None:
        first = self._num_indexed
        last = self._num_indexed = min(len(token_ids), first + NEW_TOKENS_MAX)
        of_three, of_two = self._ends
        for end in range(max(first, 2), last):
            pair = token_ids[end - 2] << 32 | token_ids[end - 1]
            of_two[pair] = end
            if end > 2:
                of_three[token_ids[end - 3] << 64 | pair] = end
