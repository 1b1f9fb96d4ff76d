"""At which boundaries of a prompt which workers can go on: the longest ones first."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, reduce
from itertools import accumulate
from operator import and_

from disagg.kv.kinds.registry import KINDS
from disagg.messages.registration import GroupInfo
from disagg.routing.prompt_walk import HolderRuns
from disagg.routing.worker_bits import bits_of

EVERYBODY = -1
"""The bits of all workers, and of all who may come: an int with all bits set."""

Level = tuple[int, int]
"""Tokens, and the bits of the workers for whom that is the longest prefix."""


class _Window:
    """The AND over runs ``first .. last`` of which neither ever goes up: one AND per step.

    The upper part is kept as a stack of ANDs from below, so that taking its last run off costs
    nothing; what is added below is ANDed into one mask.
    """

    def __init__(self, masks: Sequence[int]) -> None:
        self._masks = masks
        self._first = len(masks)
        self._last = len(masks) - 1
        self._stack: list[int] = []
        self._below = EVERYBODY

    def over(self, first: int, last: int) -> int:
        """The AND of the masks of these runs."""
        masks = self._masks
        if last < self._first:  # nothing of the window before is left
            self._first, self._last, self._below = last + 1, last, EVERYBODY
            self._stack.clear()
        while self._last > last:
            if not self._stack:
                self._stack = list(accumulate(masks[self._first : self._last + 1], and_))
                self._below = EVERYBODY
            self._stack.pop()
            self._last -= 1
        if self._first > first:
            self._below = reduce(and_, masks[first : self._first], self._below)
            self._first = first
        return self._below & self._stack[-1] if self._stack else self._below


class _Usable:
    """Who can go on at a boundary, in one group; asked from the last boundary to the first."""

    def __init__(self, group: GroupInfo, runs: HolderRuns) -> None:
        self.block_tokens = group.block_tokens
        self._group = group
        self._first_needed: Callable[[GroupInfo, int], int] = KINDS[group.kind].first_needed
        self._runs = runs
        self._window = _Window(runs.masks)
        self._number = len(runs.starts) - 1
        self._lower = self._number

    def at(self, num_blocks: int) -> int:
        """Who holds what a query after so many blocks needs."""
        first, starts = self._first_needed(self._group, num_blocks), self._runs.starts
        if first == num_blocks:
            return EVERYBODY
        if num_blocks > self._runs.num_blocks:
            return 0
        self._number = bisect_left(starts, num_blocks, 0, self._number + 1) - 1
        self._lower = bisect_right(starts, first, 0, min(self._lower, self._number) + 1) - 1
        return self._window.over(self._lower, self._number)


def levels(
    groups: Sequence[GroupInfo],
    holders: Sequence[HolderRuns],
    step_tokens: int,
    num_tokens_max: int,
    everybody: int,
) -> Iterator[Level]:
    """Longest prefix on which all groups agree, per worker: longest first, none at 0 tokens.

    A kind of group is known by `Spec.first_needed` alone, which never goes down as a prompt gets
    longer. So inside a run of equal holders the last boundary is the best one: it needs the fewest
    runs before it. Only boundaries that need nothing at all are better than those after them.

    Args:
        groups: those that have to agree.
        holders: of each group's blocks of the prompt.
        step_tokens: boundaries are its multiples, and each group's blocks end there.
        num_tokens_max: longest prefix wanted.
        everybody: bits of the workers to be found.
    """
    longest = min(
        num_tokens_max,
        *(r.num_blocks * g.block_tokens for g, r in zip(groups, holders, strict=True)),
    )
    steps = [longest // step_tokens]
    """Boundaries worth a look, in steps; some of them twice."""
    for group, runs in zip(groups, holders, strict=True):
        free = _free_boundaries(group, longest // group.block_tokens)
        ratio = step_tokens // group.block_tokens
        steps += runs.starts if ratio == 1 else [at // ratio for at in runs.starts]
        steps += free if ratio == 1 else [at // ratio for at in free if at % ratio == 0]
    steps.sort(reverse=True)
    usable = [_Usable(group, runs) for group, runs in zip(groups, holders, strict=True)]
    missing, before = everybody, steps[0] + 1
    for number in steps:
        end = number * step_tokens
        if number == before or end > longest:
            continue
        if not number:
            return
        before, mask = number, missing
        for one in usable:
            mask &= one.at(end // one.block_tokens)
            if not mask:
                break
        if mask:
            yield end, mask
            missing ^= mask
            if not missing:
                return


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
