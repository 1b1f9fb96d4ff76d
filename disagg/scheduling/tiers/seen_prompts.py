"""Which parts of prompts came a second time, for tiers that keep no prompt seen once."""

from collections.abc import Iterable
from itertools import islice


class SeenPrompts:
    """Chain values of prompts and answers, the latest ``values_max`` of them.

    A value stands for all tokens before it, so it comes again only with all of them.
    """

    def __init__(self, values_max: int) -> None:
        self._values_max = values_max
        self._again: dict[bytes, bool] = {}

    def prompt(self, values: Iterable[bytes]) -> list[bytes]:
        """A prompt with these values comes; returns those that come for the second time now."""
        known = self._again
        second = []
        for value in values:
            again = value in known
            if again and not known.pop(value):
                second.append(value)
            known[value] = again
        self._forget()
        return second

    def computed(self, values: Iterable[bytes]) -> list[bytes]:
        """Blocks with these values are cached now; returns those whose prompt has come again."""
        known = self._again
        again = [value for value in values if known.setdefault(value, False)]
        self._forget()
        return again

    def _forget(self) -> None:
        # All at once: to find the first key steps over all that were deleted before it.
        num = max(0, len(self._again) - self._values_max)
        for value in list(islice(self._again, num)):
            del self._again[value]
