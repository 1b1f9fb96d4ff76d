"""A prompt's blocks looked up in a chain store: who holds them, run by run."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from itertools import chain as joined
from operator import and_

from disagg.routing.chain import Chain
from disagg.routing.chain_store import ChainStore
from disagg.routing.worker_bits import EVERYBODY


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
        self._pieces: list[tuple[int, int, Chain | None, int]] = []
        """First block, end, chain and offset of what was looked at, one after the other."""
        self._begins: list[int] = []

    @property
    def num_values(self) -> int:
        """Blocks of the prompt."""
        return len(self._values)

    def leading(self, layers: Sequence[int]) -> tuple[list[int], list[int], int]:
        """Who holds the prompt from its first block on, in any of these layers.

        Returns:
            Starts of runs of blocks, who holds everything up to the end of each run, and the end of
            the last one: nobody holds the block after it as well.
        """
        starts: list[int] = []
        masks: list[int] = []
        number = end = 0
        everything = EVERYBODY
        while end < len(self._values):
            if number == len(self._pieces) and not self._advance(over_gaps=False):
                break
            begin, stop, found, offset = self._pieces[number]
            if found is None:
                break
            number += 1
            more, theirs = _united(found, layers, offset, offset + stop - begin)
            theirs[0] &= everything
            theirs = list(accumulate(theirs, and_))
            everything, end = theirs[-1], stop
            if not everything:
                gap = theirs.index(0)
                end = begin - offset + more[gap]
                more, theirs = more[:gap], theirs[:gap]
            starts += more if begin == offset else [begin - offset + at for at in more]
            masks += theirs
            if not everything:
                break
        return starts, masks, end

    def runs(self, layers: Sequence[int], begin: int, end: int) -> tuple[list[int], list[int]]:
        """Starts and holders of the runs in a range of blocks; the first starts at ``begin``."""
        while self._end < end:
            self._advance(over_gaps=True)
        starts: list[int] = []
        masks: list[int] = []
        number = bisect_right(self._begins, begin) - 1
        while begin < end:
            first, stop, found, offset = self._pieces[number]
            stop = min(stop, end)
            if found is None:
                starts.append(begin)
                masks.append(0)
            else:
                back = offset - first
                more, theirs = _united(found, layers, begin + back, stop + back)
                starts += [at - back for at in more] if back else more
                masks += theirs
            begin = stop
            number += 1
        return starts, masks

    @property
    def _end(self) -> int:
        """Of what was looked at."""
        return self._pieces[-1][1] if self._pieces else 0

    def _advance(self, *, over_gaps: bool) -> bool:
        """Look at what is next; False at a gap that nobody wants to go over."""
        begin = self._end
        found = self._store.find(self._values[begin])
        if found is not None:
            chain, offset = found
            num = chain.num_in_prompt(offset, self._values, begin)
            self._pieces.append((begin, begin + num, chain, offset))
        elif over_gaps:
            end = self._store.next_known(self._values, begin + 1)
            self._pieces.append((begin, end, None, 0))
        else:
            return False
        self._begins.append(begin)
        return True


def _united(
    chain: Chain, layers: Sequence[int], begin: int, end: int
) -> tuple[list[int], list[int]]:
    """Starts and masks of the runs in a range of a chain, over several layers."""
    used = [runs for layer in layers if (runs := chain.layers[layer]) is not None]
    if not used:
        return [begin], [0]
    if len(used) == 1:
        return used[0].between(begin, end)
    pieces = [dict(zip(*runs.between(begin, end), strict=True)) for runs in used]
    starts = sorted(set(joined.from_iterable(pieces)))
    now, masks = [0] * len(used), []
    for start in starts:
        mask = 0
        for i, piece in enumerate(pieces):
            now[i] = piece.get(start, now[i])
            mask |= now[i]
        masks.append(mask)
    return starts, masks
