"""How long steps take by what they compute, without those that say nothing of the next ones."""

from collections.abc import Iterable

from disagg.messages.step_times import PAIRS, SCALE_TOKENS, StepShape, StepTimes
from disagg.scheduling.step import SequenceSlice

WARM_UP_STEPS = 2
"""The first steps of a life: memory is touched, threads start."""


def shape_of(slices: Iterable[SequenceSlice]) -> StepShape:
    """Shape of a step: a slice of one token with a sample is a decode, with drafts or without."""
    num_prefill = num_decodes = prefill_context = decode_context = 0
    for part in slices:
        num_tokens = len(part.token_ids)
        if num_tokens - part.num_drafts == 1 and part.sampling is not None and part.start:
            num_decodes += 1
            decode_context += part.start
        else:
            num_prefill += num_tokens
            prefill_context += num_tokens * part.start + num_tokens * (num_tokens - 1) // 2
    return StepShape(
        num_prefill, prefill_context / SCALE_TOKENS, num_decodes, decode_context / SCALE_TOKENS
    )


class StepMeter:
    """Adds steps up. The first ones of a life count for nothing, nor does the first of a size.

    In those an engine compiles, captures or allocates what later ones find; and peers' models of
    speed have been spoiled by them (dynamo#12430).

    Args:
        step_tokens_max: most tokens of a step here.
    """

    def __init__(self, step_tokens_max: int = 0) -> None:
        self._step_tokens_max = step_tokens_max
        self._num_seen = self._num_steps = 0
        self._sizes: set[tuple[int, int]] = set()
        """Of the steps so far: number of bits of prompt tokens and of decodes; at most 33 x 33."""
        self._products = [0.0] * len(PAIRS)
        self._timed = [0.0] * len(StepTimes().timed)

    def add(self, shape: StepShape, took_ms: float) -> None:
        """Count a step that has ended."""
        self._num_seen += 1
        size = shape.num_prefill_tokens.bit_length(), shape.num_decodes.bit_length()
        cold = self._num_seen <= WARM_UP_STEPS or size not in self._sizes
        self._sizes.add(size)
        if cold or not any(size):
            return
        self._num_steps += 1
        features = shape.features
        for number, (one, other) in enumerate(PAIRS):
            self._products[number] += features[one] * features[other]
        for number, feature in enumerate(features):
            self._timed[number] += feature * took_ms

    @property
    def times(self) -> StepTimes:
        """All sums so far."""
        return StepTimes(
            self._num_steps, tuple(self._products), tuple(self._timed), self._step_tokens_max
        )
