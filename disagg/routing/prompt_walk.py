"""A prompt's blocks looked up in a chain store: who holds them, run by run."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain as joined

from disagg.routing.chain import Chain
from disagg.routing.chain_store import ChainStore


@dataclass(frozen=True, slots=True)
class HolderRuns:
    """Who holds each block of a prompt, in one group."""

    starts: list[int]
    """First block of each run; the first run starts at 0, if there is one."""
    masks: list[int]
    """Who holds every block of the run."""
    num_blocks: int
    """End of the last run; what comes after it is held by nobody, or of no use."""


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

    @property
    def num_values(self) -> int:
        """Blocks of the prompt."""
        return len(self._values)

    def holders(
        self, layers: Sequence[int], num_blocks_max: int | None = None, *, over_gaps: bool
    ) -> HolderRuns:
        """Who holds the blocks, in any of these layers.

        Args:
            layers: places of one group.
            num_blocks_max: no more of the prompt's blocks than these; a few more may be given.
            over_gaps: go on after a block that nobody has, for a group that may not need it.
        """
        starts: list[int] = []
        masks: list[int] = []
        number = end = 0
        most = len(self._values) if num_blocks_max is None else num_blocks_max
        while end < most:
            if number == len(self._pieces) and not self._advance(end, over_gaps=over_gaps):
                break
            begin, end, found, offset = self._pieces[number]
            number += 1
            if found is None:
                if not over_gaps:
                    end = begin
                    break
                starts.append(begin)
                masks.append(0)
                continue
            more, theirs = _united(found, layers, offset, offset + end - begin)
            if not over_gaps and 0 in theirs:
                gap = theirs.index(0)
                end = begin + more[gap] - offset
                more, theirs, most = more[:gap], theirs[:gap], end
            starts += more if begin == offset else [begin - offset + at for at in more]
            masks += theirs
        return HolderRuns(starts, masks, end)

    def _advance(self, begin: int, *, over_gaps: bool) -> bool:
        """Look at what is next; False at a gap that nobody wants to go over."""
        found = self._store.find(self._values[begin])
        if found is not None:
            chain, offset = found
            num = chain.num_in_prompt(offset, self._values, begin)
            self._pieces.append((begin, begin + num, chain, offset))
        elif over_gaps:
            end = self._store.next_known(self._values, begin + 1)
            self._pieces.append((begin, end, None, 0))
        return found is not None or over_gaps


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
