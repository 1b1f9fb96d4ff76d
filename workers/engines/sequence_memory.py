"""What a sampler keeps of the sequences that need it, from steps and from what is sampled."""

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.scheduling.step import SequenceSlice


class Kept(Protocol):
    """Of one sequence; follows its tokens."""

    def append(self, token_id: int) -> None:
        """Take in a generated token."""


K = TypeVar("K", bound=Kept)


class SequenceMemory(Generic[K]):
    """Begun when a sequence samples for the first time, from its tokens so far; ended with it.

    What is a prompt's token and what was generated is told apart by position
    (``sampling.num_prompt_tokens``), so that a sequence that begins anew, here or elsewhere, has
    what it had.
    """

    def __init__(self) -> None:
        self._known: dict[RequestKey, Sequence[int]] = {}
        """Of sequences that have not sampled yet: whether they need anything is not known."""
        self._kept: dict[RequestKey, K] = {}

    def __len__(self) -> int:
        return len(self._known) + len(self._kept)

    def apply(self, ended: Iterable[RequestKey], slices: Iterable[SequenceSlice]) -> None:
        """Forget what a step ends and take in the tokens of what is new in it."""
        for key in ended:
            self._forget(key)
        for part in slices:
            if part.is_new:
                self._forget(part.key)
                self._known[part.key] = part.known_token_ids

    def add(self, part: SequenceSlice, token_id: int) -> None:
        """Take in the token that a slice sampled."""
        kept = self._kept.get(part.key)
        if kept is not None:
            kept.append(token_id)

    def of(self, part: SequenceSlice) -> K | None:
        """What is kept of the sequence of a slice that samples; None where it needs nothing."""
        known = self._known.pop(part.key, None)
        if part.sampling is None or not self.needed(part.sampling):
            return None
        if known is not None:
            self._kept[part.key] = self.begin(known, part.sampling)
        return self._kept[part.key]

    def needed(self, sampling: SamplingParams) -> bool:
        """Whether anything is kept of a sequence that is sampled so."""
        raise NotImplementedError

    def begin(self, token_ids: Sequence[int], sampling: SamplingParams) -> K:
        """What is kept of a sequence with these tokens."""
        raise NotImplementedError

    def _forget(self, key: RequestKey) -> None:
        self._known.pop(key, None)
        self._kept.pop(key, None)
