"""At which boundaries of a prompt which workers can go on: the longest ones first."""

from collections.abc import Generator, Iterator, Sequence
from itertools import chain, compress, islice, repeat
from operator import and_, mul, xor

from disagg.messages.lazy import cached_property
from disagg.routing.boundaries import Boundaries, Leading, Trailing
from disagg.routing.worker_bits import bits_of

_STEPS_MAX = 8
"""So many boundaries are looked at one by one before a sweep: plans mostly end there."""
_SWEEP_RUNS = 32
"""Of the first sweep; each further one has four times as many, and the first after steps too."""

Level = tuple[int, int]
"""Tokens, and the bits of the workers for whom that is the longest prefix."""


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


class Levels:
    """Levels, computed only as far as they are looked at; longest first."""

    def __init__(self, rest: Iterator[list[Level]]) -> None:
        self._rest = rest
        self._known: list[Level] = []
        self._all_known = False

    def __iter__(self) -> Iterator[Level]:
        known, number = self._known, 0
        while True:
            if number < len(known):  # somebody else went on meanwhile
                some = known[number:]
            else:
                some = next(self._rest, [])
                if not some:
                    self._all_known = True
                    return
                known += some
            number += len(some)
            yield from some

    def known_of(self, bits: int) -> int | None:
        """Longest prefix of any of these workers; None: it is not among the levels found so far."""
        none = 0 if self._all_known else None
        return next((tokens for tokens, mask in self._known if mask & bits), none)

    @cached_property
    def tokens(self) -> dict[int, int]:
        """Longest prefix by worker's bit; without those that have none."""
        return {bit: tokens for tokens, mask in self for bit in bits_of(mask)}
