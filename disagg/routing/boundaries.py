"""Who can go on after which blocks of a prompt, in one group."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from itertools import accumulate, compress, islice, repeat
from operator import and_, ne
from typing import Protocol

from disagg.kv.kinds.registry import KINDS
from disagg.messages.registration import GroupInfo
from disagg.routing.worker_bits import EVERYBODY

_BLOCKS_MIN = 256
"""So many blocks are looked up at least; most of the cost is per look-up."""
_FEW = 8
"""So few blocks are looked up without asking first whether anybody has the lowest of them."""
_PREPARED_BLOCKS = 1 << 13
"""What prompts of so many blocks need is found out once per group, before the first one comes."""


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
        return Leading(self._group, *narrowed(*self.between(low, end), bits), end)

    def of_one(self, bit: int) -> "Leading":
        """The same for one worker, up to the last block that it holds."""
        number = bisect_left(self._masks, True, key=lambda mask: not mask & bit)
        end = self._starts[number] if number < len(self._starts) else self.num_blocks
        return Leading(self._group, [0], [bit], end)


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
        starts, masks = narrowed(*self._runs(self._firsts[low], end), bits)
        one._starts, one._masks = starts[::-1], masks[::-1]
        return one

    def of_one(self, bit: int) -> "Trailing":
        """The same for one worker."""
        runs = self._runs
        return Trailing(
            self._group, lambda begin, end: narrowed(*runs(begin, end), bit), self.num_blocks
        )

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


def narrowed(starts: Sequence[int], masks: Sequence[int], bits: int) -> tuple[list[int], list[int]]:
    """Runs of these workers alone: much fewer where they are few."""
    masks = list(map(and_, masks, repeat(bits)))
    begins = [True, *map(ne, masks, islice(masks, 1, None))]
    return list(compress(starts, begins)), list(compress(masks, begins))


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
