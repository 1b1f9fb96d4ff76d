"""What a reader knows of a lease's offers, and what of its destinations is still missing."""

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.errors import InvariantViolation
from disagg.transfer.messages import OfferedRange, Offers, Seal


@dataclass(frozen=True, slots=True)
class Page:
    """One block to pull."""

    group: int
    position: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Lie:
    """What an owner did that the protocol forbids, and at which block, where known."""

    problem: str
    group: int = -1
    position: int = -1


class OfferList:
    """The offers of one lease as they arrive, in the owner's numbering.

    Args:
        destinations: per group, (position, block id) of every block that must be offered.

    Raises:
        InvariantViolation: a destination is named twice.
    """

    def __init__(self, destinations: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.num_blocks = tuple(map(len, destinations))
        self.ranges: list[OfferedRange] = []
        self.seal: Seal | None = None
        self._missing = [dict(pairs) for pairs in destinations]
        if tuple(map(len, self._missing)) != self.num_blocks:
            raise InvariantViolation(f"a position is named twice: {destinations}")

    def take(self, offers: Offers) -> list[Page] | Lie:
        """Add what is new; returns the blocks to pull for it. Repetitions add nothing.

        Offers beyond a gap must not be given; `has_gap` says so.
        """
        repeated = len(self.ranges) - offers.first
        seen = self.ranges[max(0, offers.first) : offers.first + len(offers.ranges)]
        contradicts = self.seal and offers.seal and offers.seal != self.seal
        if offers.first < 0 or seen != list(offers.ranges[:repeated]) or contradicts:
            return Lie("an offer contradicts an earlier one")
        pages: list[Page] = []
        for offered in offers.ranges[repeated:]:
            problem = self._claim(offered, pages)
            if problem:
                return Lie(problem, offered.group, offered.position)
        self.seal = self.seal or offers.seal
        return pages

    def has_gap(self, offers: Offers) -> bool:
        """Whether offers before these are not known."""
        return offers.first > len(self.ranges)

    @property
    def all_listed(self) -> bool:
        """Whether the seal and at least as many offers as it counts are known."""
        return self.seal is not None and len(self.ranges) >= sum(self.seal.num_ranges)

    @property
    def num_ranges(self) -> tuple[int, ...]:
        """Offers per group."""
        counts = [0] * len(self._missing)
        for offered in self.ranges:
            counts[offered.group] += 1
        return tuple(counts)

    def incomplete(self, seal: Seal) -> Lie | None:
        """What of the seal's counts or of the destinations is not met."""
        if seal.num_ranges != self.num_ranges:
            return Lie("the seal's counts are not those of the offers")
        for group, missing in enumerate(self._missing):
            if missing:
                return Lie("sealed without a destination's block", group, min(missing))
        return None

    def _claim(self, offered: OfferedRange, pages: list[Page]) -> str:
        if not 0 <= offered.group < len(self._missing) or offered.num_blocks < 1:
            return "an offer names no group or no blocks"
        missing = self._missing[offered.group]
        for i in range(offered.num_blocks):
            position = offered.position + i
            dst = missing.pop(position, None)
            if dst is None:
                return f"position {position} is no destination, or was offered twice"
            pages.append(Page(offered.group, position, offered.block_id + i, dst))
        self.ranges.append(offered)
        return ""
