"""At which boundaries of a prompt which workers can go on: the longest ones first."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial, reduce
from itertools import accumulate, chain, compress, islice, repeat
from operator import and_, mul, xor
from typing import Protocol

import numpy as np

from disagg.kv.kinds.registry import KINDS
from disagg.messages.lazy import cached_property
from disagg.messages.registration import GroupInfo
from disagg.routing.worker_bits import EVERYBODY, bits_of

_BLOCKS_MIN = 256
"""So many blocks are looked up at least; most of the cost is per look-up."""
_FEW = 8
"""So few blocks are looked up without asking first whether anybody has the lowest of them."""
_PREPARED_BLOCKS = 1 << 13
"""What prompts of so many blocks need is found out once per group, before the first one comes."""
_STEPS_MAX = 8
"""So many boundaries are looked at one by one before a sweep: plans mostly end there."""
_SWEEP_RUNS = 32
"""Of the first sweep; each further one has four times as many, and the first after steps too."""

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

    def last_runs(self, num_blocks: int, num_max: int) -> tuple[Sequence[int], Sequence[int]]:
        """Starts and masks of at most so many runs, the last ones among so many blocks."""
        after = bisect_left(self._starts, num_blocks)
        first = max(0, after - num_max)
        return self._starts[first:after], self._masks[first:after]

    def between(self, begin: int, end: int) -> tuple[Sequence[int], Sequence[int]]:
        """Starts and masks of the runs in a range; the first one starts at ``begin``."""
        first, after = bisect_right(self._starts, begin), bisect_left(self._starts, end)
        return [begin, *self._starts[first:after]], self._masks[first - 1 : after]


class Trailing:
    """Boundaries of a group of which a query needs the last blocks; asked for from the last down.

    Holders are looked up as far down as somebody asks. What a query needs is the AND over a window
    of runs of which neither end ever goes up, at one AND per step: of its upper part all ANDs from
    some run in the middle up are kept, so that taking its top run off costs nothing; what is added
    below is ANDed into one mask.

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
        self._firsts, self._free, self._after = _needs_of(group, num_blocks)
        self._any_free = self._free[num_blocks] > 0
        self._runs = runs
        self._starts: list[int] = []
        self._masks: list[int] = []
        """Of the runs that were looked up, the last one first."""
        self._last = 0
        """Number of the run that has the last block before the boundary."""
        self._middle = self._bottom = 0
        """Numbers of a run inside the window that was last, and of the one after its last."""
        self._upper: list[int] = []
        """ANDs of so many masks above the middle: of one, of two, and so on."""
        self._lower = EVERYBODY
        """The AND of those from the middle down."""
        self._ahead = _BLOCKS_MIN

    def at(self, num_blocks: int) -> tuple[int, int]:
        """See `Boundaries.at`."""
        first = self._firsts[num_blocks]
        if first == num_blocks:
            return EVERYBODY, num_blocks - 1
        starts = self._starts
        if not starts or starts[-1] > first:
            self._look_down_to(first)
        last = self._last
        while starts[last] >= num_blocks:
            last += 1
        self._last = last
        bottom = self._bottom - 1
        if bottom < last:
            bottom = last
        while starts[bottom] > first:
            bottom += 1
        mask = self._masks[bottom]
        if not mask:  # down to there each boundary needs a block of that run
            return 0, self._worth(first, starts[bottom])
        if bottom > last:
            mask = self._window(last, bottom + 1)
        start = starts[last]
        return mask, self._worth(num_blocks - 1, start) if self._any_free else start

    def adds_nothing(self, leading: Leading, ends: Sequence[int], masks: Sequence[int]) -> bool:
        """Whether whoever has a level in a group that needs everything can go on there here too.

        A run of this group is needed where somebody's level is behind its start, but not so far
        that a query needs only what comes after it. The levels and the runs are walked once side by
        side, and who ends between two levels is the difference of their holders: there each holder
        of a run holds all that is below it too.

        Args:
            leading: the other group, with blocks of the same size.
            ends: of some of its runs, one behind the other: the boundaries of the levels.
            masks: who holds everything up to each, and after them who does not matter any more.
        """
        first, highest = self._firsts[ends[0]], ends[-1]
        if first == highest:
            return True
        theirs, holders = self._runs(first, highest)
        starts, wanted = leading.between(first, highest)
        if theirs == starts and list(map(and_, wanted, holders)) == wanted:
            return True  # and it takes half as long to see this
        after = self._after
        behind = chain(map(after.__getitem__, islice(theirs, 1, None)), (after[highest],))
        begin = end = 0
        ends = [*ends, len(after)]
        for start, past, held in zip(theirs, behind, holders, strict=True):
            while ends[begin] <= start:
                begin += 1
            while ends[end] < past:
                end += 1
            if begin < end:
                needing = masks[begin] ^ masks[end]
                if needing != held and needing & held != needing:  # mostly nobody else holds it
                    return False
        return True

    def _worth(self, num_blocks: int, start: int) -> int:
        """The start of a run, or the last boundary of at most so many blocks that needs nothing."""
        free = self._free[num_blocks]
        return free if free > start else start

    def _look_down_to(self, block: int) -> None:
        low = self._starts[-1] if self._starts else self.num_blocks
        if low - block > _FEW and not any(self._runs(block, block + 1)[1]):
            # As far as it matters: what is asked next needs this block too, or nothing above it.
            self._starts.append(block)
            self._masks.append(0)
            self._ahead = _BLOCKS_MIN
            return
        starts, masks = self._runs(max(0, low - max(2 * (low - block), self._ahead)), low)
        self._starts += reversed(starts)
        self._masks += reversed(masks)
        self._ahead *= 4  # or each long run would be looked up in many pieces

    def _window(self, top: int, bottom: int) -> int:
        """The AND of the masks of these runs."""
        if top >= self._middle:  # all that was above the middle is above the window
            self._middle = self._bottom = bottom
            self._upper = list(accumulate(reversed(self._masks[top:bottom]), and_))
            self._lower = EVERYBODY
            return self._upper[-1]
        if self._bottom < bottom:
            self._lower = reduce(and_, self._masks[self._bottom : bottom], self._lower)
            self._bottom = bottom
        return self._upper[self._middle - 1 - top] & self._lower


def levels(
    groups: Sequence[Boundaries], step_tokens: int, num_tokens_max: int, everybody: int
) -> Iterator[list[Level]]:
    """Longest prefix on which all groups agree, per worker: longest first, none at 0 tokens.

    They come some at a time, as they are found.

    Args:
        groups: those that have to agree.
        step_tokens: boundaries are its multiples, and each group's blocks end there.
        num_tokens_max: longest prefix wanted.
        everybody: bits of the workers to be found.
    """
    longest = min(num_tokens_max, *(one.num_blocks * one.block_tokens for one in groups))
    end, missing = longest - longest % step_tokens, everybody
    asked = [(one.at, one.block_tokens) for one in groups]
    can_sweep = all(one.block_tokens == step_tokens for one in groups)
    num_steps, num_runs = (_STEPS_MAX, 4 * _SWEEP_RUNS) if len(groups) > 1 else (0, _SWEEP_RUNS)
    pause = 2 * _SWEEP_RUNS
    found: list[Level] = []
    num_wanted = 1
    while end > 0:
        if can_sweep and not num_steps:
            swept = _swept(groups, end, num_runs, missing)
            if swept is not None:
                end, more, missing = swept
                if found := found + more:
                    yield found
                    found = []
                if not missing:
                    return
                num_runs *= 4
                continue
            num_steps, num_runs = pause, _SWEEP_RUNS
            pause *= 4
        num_steps -= 1
        mask, lower = missing, 0
        for at, block_tokens in asked:
            theirs, below = at(end // block_tokens)
            mask &= theirs
            below *= block_tokens
            if not mask:  # nor at any boundary down to the next one of these groups
                lower = below if not theirs & missing else max(lower, below)
                break
            if below > lower:
                lower = below
        else:
            found.append((end, mask))
            missing ^= mask
            if len(found) == num_wanted or not missing:
                yield found
                found, num_wanted = [], min(2 * num_wanted, _SWEEP_RUNS)
            if not missing:
                return
        end = lower - lower % step_tokens
    if found:
        yield found


def _swept(
    groups: Sequence[Boundaries], end: int, num_runs: int, missing: int
) -> tuple[int, list[Level], int] | None:
    """Levels of a stretch of runs where the first group alone decides them.

    Returns:
        Where it ends, its levels, and who is still missing; None: the others decide too, or the
        runs are so few that it takes less time to look at one after the other.
    """
    leading, *others = groups
    if not isinstance(leading, Leading):
        return None
    block_tokens, num_blocks = leading.block_tokens, end // leading.block_tokens
    starts, masks = leading.last_runs(num_blocks, num_runs)
    if others and len(starts) < _STEPS_MAX:
        return None
    ends = [*starts[1:], num_blocks]
    # Each holder of a run holds all that is below it too; who is found already holds them all.
    masks = [*masks, masks[-1] & ~missing]
    for other in others:
        if not isinstance(other, Trailing) or not other.adds_nothing(leading, ends, masks):
            return None
    new = list(map(xor, masks, islice(masks, 1, None)))
    new.reverse()
    found = zip(map(mul, reversed(ends), repeat(block_tokens)), new, strict=True)
    return starts[0] * block_tokens, list(compress(found, new)), missing & ~masks[0]


def prepare(group: GroupInfo) -> None:
    """Find out what queries of a group need, or the first look-up would have to."""
    _needs_of(group, 0)


def _needs_of(
    group: GroupInfo, num_blocks: int
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """By boundary, up to so many blocks: the first block that a query needs; free boundaries.

    Those are where a query needs nothing: of each boundary the last one that is not after it; 0:
    none is. Last, by block: the first boundary that needs no block before it.
    """
    size = max(_PREPARED_BLOCKS, 1 << (num_blocks - 1).bit_length())
    return _needs(KINDS[group.kind].first_needed, group, size)


@lru_cache(maxsize=64)
def _needs(
    first_needed: Callable[[GroupInfo, int], int], group: GroupInfo, num_blocks: int
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    firsts = array("I", map(partial(first_needed, group), range(num_blocks + 1)))
    free = (at if first == at else 0 for at, first in enumerate(firsts))
    after = np.searchsorted(np.array(firsts), np.arange(num_blocks + 1))
    return firsts, array("I", accumulate(free, max)), array("I", after.tolist())


class Levels:
    """Levels, computed only as far as they are looked at; longest first."""

    def __init__(self, rest: Iterator[list[Level]]) -> None:
        self._rest = rest
        self._known: list[Level] = []

    def __iter__(self) -> Iterator[Level]:
        known, number = self._known, 0
        while True:
            if number < len(known):  # somebody else went on meanwhile
                some = known[number:]
            else:
                some = next(self._rest, [])
                if not some:
                    return
                known += some
            number += len(some)
            yield from some

    def most_of(self, bits: int) -> int:
        """Longest prefix of any of these workers; looked for no further than to it."""
        return next((tokens for tokens, mask in self if mask & bits), 0)

    @cached_property
    def tokens(self) -> dict[int, int]:
        """Longest prefix by worker's bit; without those that have none."""
        return {bit: tokens for tokens, mask in self for bit in bits_of(mask)}
