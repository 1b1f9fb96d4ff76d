"""The earlier tokens of sequences that ask for penalties, counted, as a sampler needs them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from disagg.messages.sampling import SamplingParams
from disagg.scheduling.step import SequenceSlice
from disagg.workers.engines.sequence_memory import SequenceMemory


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Distinct tokens of a sequence, and how often each was generated (0: in the prompt only)."""

    token_ids: NDArray[np.int64] = field(repr=False)
    counts: NDArray[np.int64] = field(repr=False)


class TokenHistories(SequenceMemory["_History"]):
    """The tokens of every sequence that has penalties, from steps and from what is sampled.

    A slice may be computed again: what was sampled beyond it is taken back.
    """

    def needed(self, sampling: SamplingParams) -> bool:
        """Whether a penalty asks for the tokens."""
        return sampling.has_penalties

    def begin(self, token_ids: Sequence[int], sampling: SamplingParams) -> "_History":
        """Count the tokens of a sequence."""
        return _History(token_ids, sampling)

    def before(self, part: SequenceSlice) -> TokenCounts | None:
        """What stands before the token that a slice samples; None where no penalty asks for it."""
        history = self.of(part)
        return None if history is None else history.first(part.start + len(part.token_ids))


class _History:
    """One sequence's distinct tokens by first occurrence, the prompt's before the others."""

    def __init__(self, token_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._num_prompt_tokens = min(sampling.num_prompt_tokens, len(token_ids))
        # Presence and frequency look at what was generated alone.
        has_prompt = sampling.repetition_penalty != 1
        prompt = token_ids[: self._num_prompt_tokens] if has_prompt else ()
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._num_of_prompt = len(self._place)
        self._token_ids = np.array([*self._place], np.int64)
        self._counts = np.zeros(len(self._place), np.int64)
        self._generated: list[int] = []
        for token_id in token_ids[self._num_prompt_tokens :]:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Count a generated token."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._token_ids):
            room = np.zeros(len(self._token_ids) + 64, np.int64)
            self._token_ids = np.concatenate((self._token_ids, room))
            self._counts = np.concatenate((self._counts, room))
        self._token_ids[place] = token_id
        self._counts[place] += 1
        self._generated.append(token_id)

    def first(self, num_tokens: int) -> TokenCounts:
        """Counts over so many tokens; what is beyond them is forgotten.

        Raises:
            ValueError: fewer are known.
        """
        num_generated = num_tokens - self._num_prompt_tokens
        if not 0 <= num_generated <= len(self._generated):
            raise ValueError(f"{len(self._generated)} generated tokens known, not {num_generated}")
        while len(self._generated) > num_generated:
            token_id = self._generated.pop()
            place = self._place[token_id]
            self._counts[place] -= 1
            if not self._counts[place] and place >= self._num_of_prompt:
                del self._place[token_id]  # it was first seen last: no place is left in between
        return TokenCounts(self._token_ids[: len(self._place)], self._counts[: len(self._place)])
