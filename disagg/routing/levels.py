"""At which boundaries of a prompt which workers can go on: the longest ones first."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, reduce
from itertools import accumulate
from operator import and_
from typing import Protocol

from disagg.kv.kinds.registry import KINDS
from disagg.messages.registration import GroupInfo
from disagg.routing.worker_bits import EVERYBODY, bits_of

_BLOCKS_MIN = 64
"""So many blocks are looked up at least; most of the cost is per look-up."""
_FEW = 8
"""So few blocks are looked up without asking first whether anybody has the lowest of them."""

Level = tuple[int, int]
"""Tokens, and the bits of the workers for whom that is the longest prefix."""


class Boundaries(Protocol):
    """Who can go on after which blocks of a prompt, in one group.

    A kind of group is known by `Spec.first_needed` alone, which never goes down as a prompt gets
    longer. So inside a run of equal holders the last boundary is the best one: it needs the fewest
    runs before it. Only boundaries that need nothing at all are better than those after them.
    """

    block_tokens: int
    num_blocks: int
    """Boundaries after more blocks than these are not asked about."""

    def at(self, num_blocks: int) -> tuple[int, int]:
        """Who holds what a query after so many blocks needs, and the next boundary worth a look.

        At the boundaries between the two nobody else can go on.
        """
        ...


class Leading:
    """Boundaries of a group of which a query needs everything; any of them may be asked for.

    Args:
        group: of the layout.
        starts: of runs of blocks.
        masks: who holds everything up to the end of each run.
        num_blocks: end of the last run.
    """

    def __init__(
        self, group: GroupInfo, starts: Sequence[int], masks: Sequence[int], num_blocks: int
    ) -> None:
        self.block_tokens = group.block_tokens
        self.num_blocks = num_blocks
        self._starts = starts
        self._masks = masks

    def at(self, num_blocks: int) -> tuple[int, int]:
        """See `Boundaries.at`."""
        number = bisect_left(self._starts, num_blocks) - 1
        return self._masks[number], self._starts[number]


class Trailing:
    """Boundaries of a group of which a query needs the last blocks; asked for from the last down.

    Holders are looked up as far down as somebody asks. What a query needs is the AND over a window
    of runs of which neither end ever goes up, at one AND per step: its upper part is kept as a
    stack of ANDs from below, so that taking its top run off costs nothing; what is added below is
    ANDed into one mask.

    Args:
        group: of the layout.
        runs: starts and masks of the holders of a range of blocks; see `PromptWalk.runs`.
        num_blocks: end of the last run.
    """

    def __init__(
        self,
        group: GroupInfo,
        runs: Callable[[int, int], tuple[Sequence[int], Sequence[int]]],
        num_blocks: int,
    ) -> None:
        self.block_tokens = group.block_tokens
        self.num_blocks = num_blocks
        self._group = group
        self._first_needed: Callable[[GroupInfo, int], int] = KINDS[group.kind].first_needed
        self._free = _free_boundaries(group, num_blocks)
        self._runs = runs
        self._starts: list[int] = []
        self._masks: list[int] = []
        """Of the runs that were looked up, the last one first."""
        self._last = 0
        """Number of the run that has the last block before the boundary."""
        self._top = self._bottom = 0
        """Numbers of the window's first run and of the one after its last."""
        self._stack: list[int] = []
        self._below = EVERYBODY
        self._ahead = _BLOCKS_MIN

    def at(self, num_blocks: int) -> tuple[int, int]:
        """See `Boundaries.at`."""
        first = self._first_needed(self._group, num_blocks)
        if first == num_blocks:
            return EVERYBODY, num_blocks - 1
        self._look_down_to(first)
        starts = self._starts
        while starts[self._last] >= num_blocks:
            self._last += 1
        bottom = max(self._last, self._bottom - 1)
        while starts[bottom] > first:
            bottom += 1
        if not self._masks[bottom]:  # down to there each boundary needs a block of that run
            return 0, self._worth(first, starts[bottom])
        mask = self._window(self._last, bottom + 1)
        return mask, self._worth(num_blocks - 1, starts[self._last])

    def _worth(self, num_blocks: int, start: int) -> int:
        """The start of a run, or the last boundary of at most so many blocks that needs nothing."""
        number = bisect_right(self._free, num_blocks)
        return max(start, self._free[number - 1]) if number else start

    def _look_down_to(self, block: int) -> None:
        low = self._starts[-1] if self._starts else self.num_blocks
        if low <= block:
            return
        if low - block > _FEW and not any(self._runs(block, block + 1)[1]):
            # As far as it matters: what is asked next needs this block too, or nothing above it.
            self._starts.append(block)
            self._masks.append(0)
            self._ahead = _BLOCKS_MIN
            return
        starts, masks = self._runs(max(0, low - max(2 * (low - block), self._ahead)), low)
        self._starts += reversed(starts)
        self._masks += reversed(masks)
        self._ahead *= 2  # or each long run would be looked up in many pieces

    def _window(self, top: int, bottom: int) -> int:
        """The AND of the masks of these runs."""
        masks = self._masks
        if top >= self._bottom:  # nothing of the window before is left
            self._top, self._bottom, self._below = top, top, EVERYBODY
            self._stack.clear()
        while self._top < top:
            if not self._stack:
                upper = masks[self._top : self._bottom]
                self._stack = list(accumulate(reversed(upper), and_))
                self._below = EVERYBODY
            self._stack.pop()
            self._top += 1
        if self._bottom < bottom:
            self._below = reduce(and_, masks[self._bottom : bottom], self._below)
            self._bottom = bottom
        return self._below & self._stack[-1] if self._stack else self._below


def levels(
    groups: Sequence[Boundaries], step_tokens: int, num_tokens_max: int, everybody: int
) -> Iterator[Level]:
    """Longest prefix on which all groups agree, per worker: longest first, none at 0 tokens.

    Args:
        groups: those that have to agree.
        step_tokens: boundaries are its multiples, and each group's blocks end there.
        num_tokens_max: longest prefix wanted.
        everybody: bits of the workers to be found.
    """
    longest = min(num_tokens_max, *(one.num_blocks * one.block_tokens for one in groups))
    end, missing = longest - longest % step_tokens, everybody
    while end > 0:
        mask, lower = missing, 0
        for one in groups:
            theirs, below = one.at(end // one.block_tokens)
            below *= one.block_tokens
            if not theirs & missing:  # nor at any boundary down to the next one of this group
                mask, lower = 0, below
                break
            mask, lower = mask & theirs, max(lower, below)
        if mask:
            yield end, mask
            missing ^= mask
            if not missing:
                return
        end = lower - lower % step_tokens


def _free_boundaries(group: GroupInfo, num_blocks: int) -> Sequence[int]:
    """Boundaries of at most so many blocks at which a query needs nothing of them."""
    known = _all_free_boundaries(group, 1 << num_blocks.bit_length())
    return known[: bisect_right(known, num_blocks)]


@lru_cache(maxsize=256)
def _all_free_boundaries(group: GroupInfo, num_blocks: int) -> tuple[int, ...]:
    first_needed, found, at = KINDS[group.kind].first_needed, [], num_blocks
    while at > 0:
        first = first_needed(group, at)
        if first == at:
            found.append(at)
            at -= 1
        else:
            at = first  # whatever boundary is between the two needs the block at ``first`` as well
    return tuple(reversed(found))


class Levels:
    """Levels, computed only as far as they are looked at; longest first."""

    def __init__(self, rest: Iterator[Level]) -> None:
        self._rest = rest
        self._known: list[Level] = []

    def __iter__(self) -> Iterator[Level]:
        number = 0
        while True:
            if number == len(self._known):
                level = next(self._rest, None)
                if level is None:
                    return
                self._known.append(level)
            yield self._known[number]
            number += 1

    def most_of(self, bits: int) -> int:
        """Longest prefix of any of these workers; looked for no further than to it."""
        return next((tokens for tokens, mask in self if mask & bits), 0)

    @cached_property
    def tokens(self) -> dict[int, int]:
        """Longest prefix by worker's bit; without those that have none."""
        return {bit: tokens for tokens, mask in self for bit in bits_of(mask)}
