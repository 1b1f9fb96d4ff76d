"""What a worker has measured of its steps: sums from which their cost is fitted."""

from dataclasses import dataclass
from itertools import combinations_with_replacement

SCALE_TOKENS = 1024
"""Tokens of context are counted in so many, so that all sums are of similar size."""
NUM_FEATURES = 5
PAIRS: tuple[tuple[int, int], ...] = tuple(
    combinations_with_replacement(range(NUM_FEATURES), 2),
)
"""Of features, in the order of `StepTimes.products`."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes, as far as its time depends on it."""

    num_prefill_tokens: int
    prefill_context: float
    """Sum over those tokens of the tokens before each in its sequence, in `SCALE_TOKENS`."""
    num_decodes: int
    """Sequences that are given their next token."""
    decode_context: float
    """Tokens before those, all together, in `SCALE_TOKENS`."""

    @property
    def features(self) -> tuple[float, ...]:
        """What the time is a sum of: a part of each step, and these."""
        return (
            1.0,
            float(self.num_prefill_tokens),
            self.prefill_context,
            float(self.num_decodes),
            self.decode_context,
        )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Sums over the steps of a worker's life; those of cold starts are left out.

    The time of a step is fitted as a sum of a constant and of what its `StepShape` says, so a fit
    needs no single step, and what two reports differ in is what happened between them.
    """

    num_steps: int = 0
    products: tuple[float, ...] = (0.0,) * len(PAIRS)
    """Sums of the products of two features, by `PAIRS`."""
    timed: tuple[float, ...] = (0.0,) * NUM_FEATURES
    """Sums of each feature times the step's time in ms."""
    step_tokens_max: int = 0
    """Most tokens of a step, the worker's own limit."""

    def since(self, earlier: "StepTimes") -> "StepTimes | None":
        """What was measured after an earlier report; None where nothing was, or it began anew."""
        if self.num_steps <= earlier.num_steps:
            return None
        return StepTimes(
            self.num_steps - earlier.num_steps,
            tuple(max(0.0, a - b) for a, b in zip(self.products, earlier.products, strict=True)),
            tuple(max(0.0, a - b) for a, b in zip(self.timed, earlier.timed, strict=True)),
            self.step_tokens_max,
        )
