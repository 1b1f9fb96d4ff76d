"""Least squares over sums of products, with no coefficient below 0 and old samples fading."""

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement

RIDGE = 1e-4
"""Share of its own square by which a feature that always came with another is kept apart from it:
of the two each explains a part, and the fit is right where they come together again."""
KNOWN_MIN = 1e-9


def solve(
    num_features: int, products: Sequence[float], timed: Sequence[float]
) -> tuple[float | None, ...]:
    """The coefficients, each at least 0, that explain the sums best; None where nothing is known.

    What comes out negative is set to 0 and the rest is solved again: a step is not shorter for
    having more to do, whatever the noise says.

    Args:
        num_features: of a sample.
        products: sums of the products of two features, upper triangle by rows. A worker tells them,
            so they may be such as no samples have: then anything, or nothing, is known.
        timed: sums of each feature times what is explained.
    """
    if not all(map(math.isfinite, (*products, *timed))):
        return (None,) * num_features
    square = _square(num_features, products)
    scale = [square[i][i] ** 0.5 for i in range(num_features)]
    known = [i for i in range(num_features) if scale[i] > KNOWN_MIN]
    found = _at_least_0(known, scale, square, timed)
    solved = {i: found.get(i, 0.0) / scale[i] for i in known}
    if not all(map(math.isfinite, solved.values())):
        return (None,) * num_features
    return tuple(map(solved.get, range(num_features)))


def _at_least_0(
    known: Sequence[int],
    scale: Sequence[float],
    square: Sequence[Sequence[float]],
    timed: Sequence[float],
) -> dict[int, float]:
    """By feature, in units of its scale; those are left out that would come out negative."""
    used = list(known)
    while used:
        rows = [
            [square[i][j] / (scale[i] * scale[j]) + (RIDGE if i == j else 0.0) for j in used]
            + [timed[i] / scale[i]]
            for i in used
        ]
        found = dict(zip(used, _eliminate(rows), strict=True))
        worst = min(used, key=found.__getitem__)
        if found[worst] >= 0:
            return found
        used.remove(worst)
    return {}


def _square(num_features: int, products: Sequence[float]) -> list[list[float]]:
    square = [[0.0] * num_features for _ in range(num_features)]
    pairs = combinations_with_replacement(range(num_features), 2)
    for (one, other), product in zip(pairs, products, strict=True):
        square[one][other] = square[other][one] = product
    return square


def _eliminate(rows: list[list[float]]) -> list[float]:
    """Solve by Gauss; a ridge on a matrix of cosines keeps every pivot above 0.

    Where these are no cosines the answer is below 0, for one that is to be left out.
    """
    size = len(rows)
    for number in range(size):
        pivot = rows[number]
        if not pivot[number] > 0:
            return [-float(i == number) for i in range(size)]
        for lower in rows[number + 1 :]:
            factor = lower[number] / pivot[number]
            if factor:
                for column in range(number, size + 1):
                    lower[column] -= factor * pivot[column]
    found = [0.0] * size
    for number in reversed(range(size)):
        row = rows[number]
        rest = sum(row[j] * found[j] for j in range(number + 1, size))
        found[number] = (row[size] - rest) / row[number]
    return found


class FadingFit:
    """Coefficients fitted to samples, of which each counts half as much after ``half_life`` others.

    Args:
        num_features: of a sample.
        half_life: in samples.

    Attributes:
        weight: samples, faded ones by what they count.
        num_added: samples, ever.
    """

    def __init__(self, num_features: int, half_life: float) -> None:
        self.weight = 0.0
        self.num_added = 0
        self._num_features = num_features
        self._half_life = half_life
        self._products = [0.0] * (num_features * (num_features + 1) // 2)
        self._timed = [0.0] * num_features
        self._solved: tuple[float | None, ...] = (None,) * num_features
        self._solved_with: int | None = None
        """``num_added`` of the other fit then; None where this one has changed since."""

    def add(self, num: int, products: Sequence[float], timed: Sequence[float]) -> None:
        """Count ``num`` samples by their sums."""
        self.fade(0.5 ** (num / self._half_life))
        # A whole life at once, as after a restart, weighs no more than what would be left of it.
        share = min(1.0, self._half_life / num)
        self.weight += share * num
        self._products = [a + share * b for a, b in zip(self._products, products, strict=True)]
        self._timed = [a + share * b for a, b in zip(self._timed, timed, strict=True)]
        self.num_added += num

    def add_sample(self, features: Sequence[float], value: float) -> None:
        """Count one sample."""
        pairs = combinations_with_replacement(features, 2)
        self.add(1, [a * b for a, b in pairs], [feature * value for feature in features])

    def fade(self, share: float) -> None:
        """Let all samples count so much of what they did, as if others had come since."""
        self.weight *= share
        self._products = [share * one for one in self._products]
        self._timed = [share * one for one in self._timed]
        self._solved_with = None

    def mean_product(self, number: int) -> float:
        """Mean of the product of two features, by its place among the products."""
        return self._products[number] / self.weight if self.weight else 0.0

    def coefficients(
        self, other: "FadingFit | None" = None, num_borrowed: float = 0.0
    ) -> tuple[float | None, ...]:
        """By feature; None for one that no sample had. Solved anew when samples have come.

        Args:
            other: a fit of more samples than these.
            num_borrowed: so many of its average samples count as if they were own ones, so what was
                never or hardly seen here is as it is elsewhere.
        """
        theirs = other.num_added if other is not None else 0
        before = self._solved_with
        if before is None or (other is not None and (theirs - before) * 2 > other.weight):
            self._solved = self._solve(other, num_borrowed)
            self._solved_with = theirs
        return self._solved

    def _solve(self, other: "FadingFit | None", num_borrowed: float) -> tuple[float | None, ...]:
        products, timed = self._products, self._timed
        if other is not None and other.weight > 0:
            share = num_borrowed / other.weight
            products = [a + share * b for a, b in zip(products, other._products, strict=True)]
            timed = [a + share * b for a, b in zip(timed, other._timed, strict=True)]
        return solve(self._num_features, products, timed)
