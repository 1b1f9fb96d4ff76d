"""A prompt's blocks looked up in a chain store: who holds them, run by run."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import and_, or_

from disagg.routing.chain import Chain
from disagg.routing.chain_store import ChainStore

_END = 1 << 62
"""Behind all blocks."""


class PromptWalk:
    """Where the blocks of one prompt are; it goes no further than somebody asks.

    Valid until the store changes.

    Args:
        store: of blocks of this size.
        values: chain values of the prompt's blocks of this size.
    """

    def __init__(self, store: ChainStore, values: Sequence[bytes]) -> None:
        self._store = store
        self._values = values
        self._begins: list[int] = []
        self._pieces: list[tuple[int, Chain, int]] = []
        """By first block the end, chain and offset of what was found; some may overlap."""

    @property
    def num_values(self) -> int:
        """Blocks of the prompt."""
        return len(self._values)

    def leading(self, layers: Sequence[int], everybody: int) -> tuple[list[int], list[int], int]:
        """Who of ``everybody`` holds the prompt from its first block on, in any of these layers.

        Returns:
            Starts of runs of blocks, who holds everything up to the end of each run, and the end of
            the last one: nobody holds the block after it as well.
        """
        starts: list[int] = []
        masks: list[int] = []
        everything, end = everybody, 0
        while end < len(self._values):
            piece = self._piece(end)
            if piece is None:
                break
            stop, found, offset = piece
            more, theirs = _united(found, layers, offset, offset + stop - end)
            theirs[0] &= everything
            theirs = list(accumulate(theirs, and_))
            everything, back = theirs[-1], offset - end
            if not everything:
                gap = theirs.index(0)
                stop = more[gap] - back
                more, theirs = more[:gap], theirs[:gap]
            starts += [at - back for at in more] if back else more
            masks += theirs
            end = stop
            if not everything:
                break
        return starts, masks, end

    def runs(self, layers: Sequence[int], begin: int, end: int) -> tuple[list[int], list[int]]:
        """Starts and holders of the runs in a range of blocks; the first starts at ``begin``."""
        starts: list[int] = []
        masks: list[int] = []
        while begin < end:
            piece = self._piece(begin)
            if piece is None:
                starts.append(begin)
                masks.append(0)
                begin = self._store.next_known(self._values, begin + 1, end)
                continue
            stop, found, offset = piece
            stop, back = min(stop, end), offset - begin
            more, theirs = _united(found, layers, offset, stop + back)
            starts += [at - back for at in more] if back else more
            masks += theirs
            begin = stop
        return starts, masks

    def _piece(self, begin: int) -> tuple[int, Chain, int] | None:
        """Where blocks from this one on are: their end, chain and offset; None: nobody has it."""
        number = bisect_right(self._begins, begin) - 1
        if number >= 0:
            first = self._begins[number]
            end, chain, offset = self._pieces[number]
            if begin < end:
                return end, chain, offset + begin - first
        found = self._store.find(self._values[begin])
        if found is None:
            return None
        chain, offset = found
        piece = begin + chain.num_in_prompt(offset, self._values, begin), chain, offset
        self._begins.insert(number + 1, begin)
        self._pieces.insert(number + 1, piece)
        return piece


def _united(
    chain: Chain, layers: Sequence[int], begin: int, end: int
) -> tuple[list[int], list[int]]:
    """Starts and masks of the runs in a range of a chain, over several layers."""
    if len(layers) == 1:
        only = chain.layers[layers[0]]
        return only.between(begin, end) if only is not None else ([begin], [0])
    used = [runs for layer in layers if (runs := chain.layers[layer]) is not None]
    if not used:
        return [begin], [0]
    return reduce(_either, (runs.between(begin, end) for runs in used))


def _either(
    one: tuple[list[int], list[int]], other: tuple[list[int], list[int]]
) -> tuple[list[int], list[int]]:
    """Who is in one of two series of runs over the same range, or in both."""
    (starts, masks), (more_starts, more_masks) = one, other
    if starts == more_starts:
        return starts, list(map(or_, masks, more_masks))
    merged: list[int] = []
    united: list[int] = []
    here = there = number = more_number = 0
    start, more_start = starts[0], more_starts[0]
    starts, more_starts = [*starts, _END], [*more_starts, _END]
    while True:
        first = start
        if start <= more_start:
            if start == _END:
                return merged, united
            here = masks[number]
            number += 1
            start = starts[number]
        if more_start <= first:
            first = more_start
            there = more_masks[more_number]
            more_number += 1
            more_start = more_starts[more_number]
        merged.append(first)
        united.append(here | there)
