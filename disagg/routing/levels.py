"""At which boundaries of a prompt which workers can go on: the longest ones first."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import lru_cache, partial, reduce
from itertools import accumulate, chain, compress, islice, repeat
from operator import and_, mul, ne, xor
from typing import Protocol

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
        self._group = group
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

    def narrowed(self, bits: int, low: int, end: int) -> "Leading":
        """The same for these workers alone, from one boundary down to behind another one."""
        return Leading(self._group, *_narrowed(*self.between(low, end), bits), end)


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
        self._group = group
        self._firsts, self._free = _needs_of(group, num_blocks)
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

    def lacking(self, leading: Leading, ends: Sequence[int], masks: Sequence[int]) -> int:
        """Who has a level in a group that needs everything, but cannot go on there here.

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
            return 0
        theirs, holders = self._runs(first, highest)
        starts, wanted = leading.between(first, highest)
        if theirs == starts and list(map(and_, wanted, holders)) == wanted:
            return 0  # and it takes half as long to see this
        firsts = [*map(self._firsts.__getitem__, ends), highest]
        ends = [*ends, highest + 1]
        begin = end = found = 0
        for start, past, held in zip(theirs, [*theirs[1:], highest], holders, strict=True):
            while ends[begin] <= start:
                begin += 1
            while firsts[end] < past:
                end += 1
            if begin < end:
                needing = masks[begin] ^ masks[end]
                if needing != held:  # mostly nobody else holds it
                    found |= needing & held ^ needing
        return found

    def narrowed(self, bits: int, low: int, end: int) -> "Trailing":
        """See `Leading.narrowed`."""
        one = Trailing(self._group, self._runs, end)
        starts, masks = _narrowed(*self._runs(self._firsts[low], end), bits)
        one._starts, one._masks = starts[::-1], masks[::-1]
        return one

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


def _narrowed(
    starts: Sequence[int], masks: Sequence[int], bits: int
) -> tuple[list[int], list[int]]:
    """Runs of these workers alone: much fewer where they are few."""
    masks = list(map(and_, masks, repeat(bits)))
    begins = [True, *map(ne, masks, islice(masks, 1, None))]
    return list(compress(starts, begins)), list(compress(masks, begins))


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
    end = longest - longest % step_tokens
    leading, *others = groups
    trailing = [one for one in others if isinstance(one, Trailing)]
    alike = all(one.block_tokens == step_tokens for one in groups)
    if not (alike and isinstance(leading, Leading) and len(trailing) == len(others)):
        yield from _steps(groups, step_tokens, end, 0, everybody, end)
        return
    num_steps, num_runs = (_STEPS_MAX, 4 * _SWEEP_RUNS) if others else (0, _SWEEP_RUNS)
    end, missing = yield from _steps(groups, step_tokens, end, 0, everybody, num_steps)
    yield from _sweeps(leading, trailing, end // step_tokens, num_runs, missing)


def _steps(
    groups: Sequence[Boundaries], step_tokens: int, end: int, low: int, missing: int, num_max: int
) -> Generator[list[Level], None, tuple[int, int]]:
    """Levels from one boundary down to behind another one, at most so many looked at one by one.

    Returns:
        The next boundary worth a look, and who has not been found.
    """
    asked = [(one.at, one.block_tokens) for one in groups]
    found: list[Level] = []
    num_wanted = 1
    for _ in range(num_max):
        if end <= low or not missing:
            break
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
            if len(found) == num_wanted:
                yield found
                found, num_wanted = [], min(2 * num_wanted, _SWEEP_RUNS)
        end = lower - lower % step_tokens
    if found:
        yield found
    return end, missing


def _sweeps(
    leading: Leading, others: Sequence[Trailing], end: int, num_runs: int, missing: int
) -> Iterator[list[Level]]:
    """Levels up to so many blocks, those of a stretch of runs at once.

    Most workers can go on where they can in the group that needs everything. For the others each
    boundary is looked at, but only those at which they themselves begin or cease to hold something.
    """
    groups: list[Leading | Trailing] = [leading, *others]
    block_tokens, late = leading.block_tokens, 0
    while end and (missing or late):
        starts, masks = leading.last_runs(end, num_runs)
        few = len(starts) < _STEPS_MAX or late.bit_count() > missing.bit_count()
        if others and few:  # it takes less time to look at each boundary
            yield from _steps(groups, block_tokens, end * block_tokens, 0, missing | late, end)
            return
        ends = [*starts[1:], end]
        # Each holder of a run holds all that is below it too; who is found already holds them all.
        masks = [*masks, masks[-1] & ~missing]
        lacking = 0
        for other in others:
            lacking |= other.lacking(leading, ends, masks)
        late |= lacking
        new = list(map(xor, masks, islice(masks, 1, None)))
        if lacking:
            new = list(map(and_, new, repeat(missing & ~lacking)))
        new.reverse()
        tokens = map(mul, reversed(ends), repeat(block_tokens))
        found = list(compress(zip(tokens, new, strict=True), new))
        missing &= ~masks[0]
        if late:
            by_tokens = dict(found)
            for length, mask in _found_late(groups, starts[0], end, late):
                by_tokens[length] = by_tokens.get(length, 0) | mask
                late ^= mask
            found = sorted(by_tokens.items(), reverse=True)
        if found:
            yield found
        end, num_runs = starts[0], 4 * num_runs


def _found_late(
    groups: Sequence[Leading | Trailing], low: int, end: int, late: int
) -> Iterator[Level]:
    """Levels of some workers from one boundary down to behind another one."""
    block_tokens = groups[0].block_tokens
    alone = [one.narrowed(late, low, end) for one in groups]
    low, end = low * block_tokens, end * block_tokens
    return chain.from_iterable(_steps(alone, block_tokens, end, low, late, end))


def prepare(group: GroupInfo) -> None:
    """Find out what queries of a group need, or the first look-up would have to."""
    _needs_of(group, 0)


def _needs_of(group: GroupInfo, num_blocks: int) -> tuple[Sequence[int], Sequence[int]]:
    """By boundary, up to so many blocks: the first block that a query needs; free boundaries.

    Those are where a query needs nothing: of each boundary the last one not after it, 0: none.
    """
    size = max(_PREPARED_BLOCKS, 1 << (num_blocks - 1).bit_length())
    return _needs(KINDS[group.kind].first_needed, group, size)


@lru_cache(maxsize=64)
def _needs(
    first_needed: Callable[[GroupInfo, int], int], group: GroupInfo, num_blocks: int
) -> tuple[Sequence[int], Sequence[int]]:
    firsts = array("I", map(partial(first_needed, group), range(num_blocks + 1)))
    free = (at if first == at else 0 for at, first in enumerate(firsts))
    return firsts, array("I", accumulate(free, max))


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
