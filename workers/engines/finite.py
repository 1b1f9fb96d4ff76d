"""Numbers that a model may not compute."""

import torch


class NonFiniteError(ArithmeticError):
    """The model computed NaN or infinity: it read KV that nobody wrote, or its weights are bad."""


def check_finite(what: str, values: torch.Tensor) -> None:
    """Look at all values, whatever their type.

    Raises:
        NonFiniteError: one is NaN or infinite; ``what`` names it.
    """
    # The sum is several times faster; finite numbers may overflow in it, so it only acquits.
    if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
        raise NonFiniteError(f"{what} is not finite")
