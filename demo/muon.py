"""Muon: momentum whose update is made orthogonal (Keller Jordan, 2024).

On this task it is what makes the look-up circuit appear within seconds; AdamW alone stays at
"some value of the document" for many times longer.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Coefficients of the quintic Newton-Schulz iteration, from the same source.
_QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon:
    """Optimiser of weight matrices; matrices of one shape are stepped as one batch.

    Attributes:
        lr: learning rate of a full-scale step.
        momentum: how much of the previous direction is kept.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.9) -> None:
        self.lr = lr
        self.momentum = momentum
        self._by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            self._by_shape.setdefault(matrix.shape, []).append(matrix)
        self._velocity = {
            shape: torch.zeros(len(group), *shape) for shape, group in self._by_shape.items()
        }

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Change every matrix by its gradient's direction, times ``lr * scale``."""
        for shape, group in self._by_shape.items():
            gradients = torch.stack([_gradient(matrix) for matrix in group])
            velocity = self._velocity[shape]
            velocity.lerp_(gradients, 1 - self.momentum)
            updates = orthogonalize(gradients.lerp(velocity, self.momentum))
            rows, columns = shape
            size = self.lr * scale * max(1.0, rows / columns) ** 0.5
            for matrix, update in zip(group, updates, strict=True):
                matrix.add_(update, alpha=-size)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring all singular values of each of ``[n, rows, columns]`` matrices near one."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide: Tensor = matrices.mT if is_tall else matrices
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(5):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if is_tall else wide


def _gradient(matrix: nn.Parameter) -> Tensor:
    if matrix.grad is None:
        raise RuntimeError("a matrix has no gradient: call backward() before step()")
    return matrix.grad
