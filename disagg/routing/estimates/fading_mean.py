"""An average of what was measured lately; once that is long ago, of all that ever was."""

from math import exp2, inf

MEAN_KEEPS = 0.9
"""Of an average that fades, with each new figure."""
LASTING_FIGURES = 1000
"""Of the lasting average each new figure is at least one in so many."""
IDLE_HALF_LIFE_MS = 10_000
"""What was measured counts half after so long without anything newer. Who was slow for a while is
given nothing to do, and would be slow for ever by what it then did."""
OUTLIER_TIMES = 4.0
"""Of what is usual a figure changes the lasting average as if it were at most so many times that:
some hundred READs of a network that hung do not outweigh thousands of one that did not."""
USUAL_FIGURES = 16
"""So many have to be there before others can be outliers."""


class FadingMean:
    """An average in which old figures fade; without new ones it comes back to what is usual.

    Args:
        usual_max: a figure up to this one is no outlier, whatever is usual; by default none is one.
    """

    def __init__(self, usual_max: float = inf) -> None:
        self._usual_max = usual_max
        self._recent = self._lasting = 0.0
        self._num = self._added_ms = 0

    def add(self, now_ms: int, figure: float) -> None:
        """Count a figure; less than 0 counts as 0: clocks are read on two machines."""
        figure = max(0.0, figure)
        recent = self.at(now_ms) if self._num else figure
        self._recent = MEAN_KEEPS * recent + (1 - MEAN_KEEPS) * figure
        self._num += 1
        if self._num > USUAL_FIGURES:
            figure = min(figure, max(OUTLIER_TIMES * self._lasting, self._usual_max))
        self._lasting += (figure - self._lasting) / min(self._num, LASTING_FIGURES)
        self._added_ms = now_ms

    def at(self, now_ms: int) -> float:
        """The average at a time, not before that of the last figure; 0 before the first one."""
        share = exp2(-max(0, now_ms - self._added_ms) / IDLE_HALF_LIFE_MS)
        return share * self._recent + (1 - share) * self._lasting
