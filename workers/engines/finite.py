"""Numbers that a model may not compute."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch


class NonFiniteError(ArithmeticError):
    """The model computed NaN or infinity: it read KV that nobody wrote, or its weights are bad."""


def check_finite(what: str, values: torch.Tensor) -> None:
    """Look at all values, whatever their type.

    Raises:
        NonFiniteError: one is NaN or infinite; ``what`` names it.
    """
    if non_finite(values.reshape(1, -1), (1,)):
        raise NonFiniteError(f"{what} is not finite")


def non_finite(values: torch.Tensor, num_rows: Sequence[int]) -> list[int]:
    """Which parts of a batch have a value that is NaN or infinite.

    Args:
        values: [rows, anything], of any float type.
        num_rows: of each part, in their order; all rows together.
    """
    # The sum is several times faster; finite numbers may overflow in it, so it only acquits.
    if bool(values.sum().isfinite()):
        return []
    rows: list[int] = values.isfinite().all(-1).logical_not().nonzero()[:, 0].tolist()
    ends = list(accumulate(num_rows))
    return sorted({bisect_right(ends, row) for row in rows})
