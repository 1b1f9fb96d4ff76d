"""What the workers of one index hold of one prompt, computed as far as it is asked for."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import lcm

from disagg.kv.kinds.registry import KINDS
from disagg.messages.identity import Incarnation
from disagg.messages.registration import GroupInfo
from disagg.routing.levels import Levels, levels
from disagg.routing.prompt_walk import HolderRuns, PromptWalk


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What one worker has of a prompt, in its pool and in its tiers."""

    usable_tokens: int
    """All groups agree."""
    group_tokens: tuple[int, ...]
    """Each group on its own, at its own block size."""
    reach_tokens: int = 0
    """All groups agree once it has loaded what its tiers have; 0: tiers have no more of it."""
    loads: tuple[tuple[int, int], ...] = ()
    """For that: tier and blocks, of each tier that it has to read."""


class PrefixHits(Mapping[Incarnation, PrefixHit]):
    """A `PrefixHit` per worker, and the levels behind them. Valid until the index changes.

    Args:
        groups: the layout.
        walks: the prompt's blocks, by block size.
        num_tokens_max: longest prefix of which use can be made.
        num_places: the pool, and tiers as far as any worker has them.
        bits: of the workers.
        everybody: all of these bits.
    """

    def __init__(
        self,
        groups: Sequence[GroupInfo],
        walks: Mapping[int, PromptWalk],
        num_tokens_max: int,
        num_places: int,
        bits: Mapping[Incarnation, int],
        everybody: int,
    ) -> None:
        self._groups = groups
        self._walks = walks
        self._num_tokens_max = num_tokens_max
        self._places = range(num_places)
        self._bits = bits
        self._holders_known: dict[tuple[int, int, int], HolderRuns] = {}
        self.everybody = everybody

    def __len__(self) -> int:
        return len(self._bits)

    def __contains__(self, worker: object) -> bool:
        return worker in self._bits  # `Mapping`'s would find out all that it holds

    def __iter__(self) -> Iterator[Incarnation]:
        return iter(self._bits)

    def __getitem__(self, worker: Incarnation) -> PrefixHit:
        bit = self._bits[worker]
        tokens, reach = self.usable.tokens.get(bit, 0), 0
        alone = tuple(one.tokens.get(bit, 0) for one in self.alone)
        if self.reached is not None:
            reach = self.reached.tokens.get(bit, 0)
        if reach <= tokens:
            return PrefixHit(tokens, alone)
        return PrefixHit(tokens, alone, reach, self._loads(bit, reach))

    def usable_by(self, worker: Incarnation) -> int:
        """`PrefixHit.usable_tokens` of one worker, without looking at those that have less."""
        return self.usable.most_of(self._bits[worker])

    def reached_by(self, worker: Incarnation) -> tuple[int, tuple[tuple[int, int], ...]]:
        """`PrefixHit.reach_tokens` and `PrefixHit.loads` of one worker, in the same way."""
        bit = self._bits[worker]
        if self.reached is None or not bit & self.loading:
            return 0, ()
        reach = self.reached.most_of(bit)
        return reach, self._loads(bit, reach)

    def alone_by(self, worker: Incarnation) -> tuple[int, ...]:
        """`PrefixHit.group_tokens` of one worker, in the same way."""
        return tuple(one.most_of(self._bits[worker]) for one in self.alone)

    @cached_property
    def usable(self) -> Levels:
        """Prefixes on which all groups agree, in pools."""
        return self._agreed(self._places[:1])

    @cached_property
    def reached(self) -> Levels | None:
        """Prefixes on which all groups agree, in pools and tiers; None: nobody has tiers."""
        return self._agreed(self._places) if len(self._places) > 1 else None

    @cached_property
    def alone(self) -> tuple[Levels, ...]:
        """Prefixes of each group on its own, in pools."""
        found = []
        for number, group in enumerate(self._groups):
            most = self._walks[group.block_tokens].num_values * group.block_tokens
            if len(self._groups) == 1 and most <= self._num_tokens_max:
                return (self.usable,)
            runs = self._holders(number, self._places[:1])
            one = levels([group], [runs], group.block_tokens, most, self.everybody)
            found.append(Levels(one))
        return tuple(found)

    @cached_property
    def loading(self) -> int:
        """Workers whose tiers have more of the prompt than their pools."""
        if self.reached is None:
            return 0
        found, as_far, short = 0, iter(self.usable), self.everybody
        tokens, mask = next(as_far, (0, 0))
        for reach, theirs in self.reached:
            while tokens >= reach:
                short &= ~mask
                tokens, mask = next(as_far, (0, 0))
            found |= theirs & short
        return found

    def most_alone(self, bits: int, number: int = 0) -> tuple[int, int]:
        """Highest sum of what groups have, each on its own, among these workers, and who has it.

        Args:
            bits: of workers, at least one.
            number: of the first group that counts.
        """
        if number == len(self._groups):
            return 0, bits
        most_after = sum(one.most_of(bits) for one in self.alone[number + 1 :])
        best, found = -1, 0
        for tokens, mask in chain(self.alone[number], [(0, bits)]):
            if tokens + most_after < best or not bits:
                break
            if theirs := mask & bits:
                bits ^= theirs
                more, those = self.most_alone(theirs, number + 1)
                if tokens + more >= best:
                    found = those | (found if tokens + more == best else 0)
                    best = tokens + more
        return best, found

    def _agreed(self, places: Sequence[int]) -> Levels:
        order = sorted(range(len(self._groups)), key=self._over_gaps)
        groups, holders, longest = [], [], self._num_tokens_max
        for number in order:
            group = self._groups[number]
            runs = self._holders(number, places, longest)
            groups.append(group)
            holders.append(runs)
            longest = min(longest, runs.num_blocks * group.block_tokens)
        step = lcm(*(group.block_tokens for group in groups))
        return Levels(levels(groups, holders, step, longest, self.everybody))

    def _holders(
        self, number: int, places: Sequence[int], num_tokens_max: int | None = None
    ) -> HolderRuns:
        """Who holds a group's blocks; looked for once, though several ask."""
        block_tokens = self._groups[number].block_tokens
        walk = self._walks[block_tokens]
        most = walk.num_values
        if num_tokens_max is not None:
            most = min(most, num_tokens_max // block_tokens)
        runs = self._holders_known.get((number, len(places), most))
        if runs is None:
            layers = [place * len(self._groups) + number for place in places]
            runs = walk.holders(layers, most, over_gaps=self._over_gaps(number))
            self._holders_known[number, len(places), most] = runs
        return runs

    def _over_gaps(self, number: int) -> bool:
        """Whether a prompt of so many blocks can be gone on with after one that is missing."""
        group = self._groups[number]
        num_blocks = self._walks[group.block_tokens].num_values
        return KINDS[group.kind].first_needed(group, num_blocks) > 0

    def _loads(self, bit: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """What a worker reads for a boundary: each block from the first tier that has it."""
        blocks: Counter[int] = Counter()
        for number, group in enumerate(self._groups):
            end = num_tokens // group.block_tokens
            first = KINDS[group.kind].first_needed(group, end)
            walk = self._walks[group.block_tokens]
            by_place = [
                walk.holders([place * len(self._groups) + number], end, over_gaps=True)
                for place in self._places
            ]
            cuts = {first, end}.union(*(runs.starts for runs in by_place))
            begins = sorted(cut for cut in cuts if first <= cut <= end)
            for begin, after in pairwise(begins):
                for place, runs in enumerate(by_place):
                    if runs.masks[bisect_right(runs.starts, begin) - 1] & bit:
                        blocks[place] += after - begin
                        break
        del blocks[0]
        return tuple((place - 1, blocks[place]) for place in sorted(blocks))
