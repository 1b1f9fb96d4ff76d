"""What the workers of a revision hold of one prompt, whatever their layouts."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import groupby
from typing import TYPE_CHECKING

from disagg.messages.identity import Incarnation

if TYPE_CHECKING:  # or each command would import numpy
    from disagg.routing.levels import Level
    from disagg.routing.prefix_hits import PrefixHit, PrefixHits


class FleetHits:
    """The hits of several indexes as one; no worker is in two. Valid until one of them changes.

    Args:
        parts: of each index.
    """

    def __init__(self, parts: "Sequence[PrefixHits]") -> None:
        self._parts = parts

    def __getitem__(self, worker: Incarnation) -> "PrefixHit":
        return self.part_of(worker)[worker]

    def part_of(self, worker: Incarnation) -> "PrefixHits":
        """The hits of its index."""
        if len(self._parts) == 1:
            return self._parts[0]
        return next(part for part in self._parts if worker in part)

    def usable(self) -> "Iterator[Level]":
        """Prefixes on which all groups agree, in pools: longest first."""
        return joined([part.usable for part in self._parts])

    def loading(self) -> "Iterator[Level]":
        """Prefixes of those whose tiers have more than their pools; some levels are of nobody."""
        return joined([part.loading() for part in self._parts])

    def always_visible(self) -> "Iterator[Level]":
        """The same of those groups alone that see everything."""
        return joined([part.always_visible for part in self._parts])


def joined(parts: "Sequence[Iterable[Level]]") -> "Iterator[Level]":
    """Levels of several parts in order, those of equal length as one."""
    return iter(parts[0]) if len(parts) == 1 else _merged(parts)


def _merged(parts: "Sequence[Iterable[Level]]") -> "Iterator[Level]":
    for tokens, equal in groupby(merge(*parts, key=_longest_first), key=_longest_first):
        mask = 0
        for _, bits in equal:
            mask |= bits
        yield -tokens, mask


def _longest_first(level: "Level") -> int:
    return -level[0]
