"""What the workers of one index hold of one prompt, computed as far as it is asked for."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import lcm

from disagg.kv.kinds.registry import KINDS, sees_everything
from disagg.messages.identity import Incarnation
from disagg.messages.lazy import cached_property
from disagg.messages.registration import GroupInfo
from disagg.routing.boundaries import Boundaries, Leading, Trailing, narrowed
from disagg.routing.levels import Level, Levels, levels
from disagg.routing.prompt_walk import PromptWalk


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
        num_tokens: of all full blocks of the prompt.
        num_places: the pool, and tiers as far as any worker has them.
        bits: of the workers.
        everybody: all of these bits.
    """

    def __init__(
        self,
        groups: Sequence[GroupInfo],
        walks: Mapping[int, PromptWalk],
        num_tokens_max: int,
        num_tokens: int,
        num_places: int,
        bits: Mapping[Incarnation, int],
        everybody: int,
    ) -> None:
        self._groups = groups
        self._walks = walks
        self._num_tokens_max = num_tokens_max
        self._num_tokens = num_tokens
        self._places = range(num_places)
        self._numbers = range(len(groups))
        self._bits = bits
        self._leading_known: dict[tuple[int, int], Leading] = {}
        self._everybody = everybody

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
        return PrefixHit(tokens, alone, reach, self._loads(bit, tokens, reach))

    def usable_by(self, worker: Incarnation) -> int:
        """`PrefixHit.usable_tokens` of one worker, without looking at others."""
        return self._usable_of(self._bits[worker])

    def reached_by(self, worker: Incarnation) -> tuple[int, tuple[tuple[int, int], ...]]:
        """`PrefixHit.reach_tokens` and `PrefixHit.loads` of one worker, in the same way."""
        bit = self._bits[worker]
        if self.reached is None:
            return 0, ()
        tokens, reach = self._usable_of(bit), self.reached.known_of(bit)
        if reach is None:
            reach = self._alone(bit, self._numbers, self._places, self._num_tokens_max)
        return (reach, self._loads(bit, tokens, reach)) if reach > tokens else (0, ())

    def always_visible_by(self, worker: Incarnation) -> int:
        """Of one worker the longest prefix in its pool of all groups that see everything."""
        return self._alone(self._bits[worker], self._seeing, self._places[:1], self._num_tokens)

    @cached_property
    def usable(self) -> Levels:
        """Prefixes on which all groups agree, in pools."""
        return self._agreed(self._numbers, self._places[:1], self._num_tokens_max)

    @cached_property
    def reached(self) -> Levels | None:
        """Prefixes on which all groups agree, in pools and tiers; None: tiers have no more."""
        if not self._tiers_may_help():
            return None
        return self._agreed(self._numbers, self._places, self._num_tokens_max)

    @cached_property
    def always_visible(self) -> Levels:
        """Prefixes, up to the whole prompt, on which groups agree that see everything, in pools.

        Without such a group there are none.
        """
        return self._agreed(self._seeing, self._places[:1], self._num_tokens)

    @cached_property
    def _seeing(self) -> list[int]:
        return [n for n in self._numbers if sees_everything(self._groups[n])]

    @cached_property
    def alone(self) -> tuple[Levels, ...]:
        """Prefixes, up to the whole prompt, of each group on its own, in pools.

        Not for plans: every block of a prompt that nobody has is looked for as the end of a state.
        """
        return tuple(self._agreed([n], self._places[:1], self._num_tokens) for n in self._numbers)

    def loading(self) -> Iterator[Level]:
        """Where workers can go on by their tiers, and who of them has less in its pool.

        At some boundaries that is nobody.
        """
        if self.reached is None:
            return
        short, as_far = self._everybody, iter(self.usable)
        tokens, mask = next(as_far, (0, 0))
        for reach, theirs in self.reached:
            while tokens >= reach:
                short &= ~mask
                tokens, mask = next(as_far, (0, 0))
            yield reach, theirs & short

    def _tiers_may_help(self) -> bool:
        """False: no tier has a block that a prefix longer than what pools have would need."""
        tiers = self._places[1:]
        everything = [number for number in self._numbers if not self._first_needed(number)]
        if not tiers or not everything:
            return bool(tiers)
        # Nobody goes on behind what pools have of such a group without the next block of it.
        seeing = self._leading(everything[0], self._places[:1])
        num_tokens = min(self._num_tokens_max, (seeing.num_blocks + 1) * seeing.block_tokens)
        for number in self._numbers:
            block_tokens = self._groups[number].block_tokens
            walk = self._walks[block_tokens]
            _, masks = walk.runs(self._layers(number, tiers), 0, num_tokens // block_tokens)
            if any(masks):
                return True
        return False

    def _agreed(self, numbers: Sequence[int], places: Sequence[int], num_tokens: int) -> Levels:
        """Prefixes of at most so many tokens on which these groups agree."""
        return Levels(self._found(numbers, places, num_tokens, self._everybody))

    def _usable_of(self, bit: int) -> int:
        known = self.usable.known_of(bit)
        if known is not None:
            return known
        return self._alone(bit, self._numbers, self._places[:1], self._num_tokens_max)

    def _alone(
        self, bit: int, numbers: Sequence[int], places: Sequence[int], num_tokens: int
    ) -> int:
        """Of one worker the longest prefix on which these groups agree."""
        if len(numbers) == 1 and not self._first_needed(numbers[0]):  # who asks often asks this
            part = self._leading(numbers[0], places).of_one(bit)
            return min(num_tokens // part.block_tokens, part.num_blocks) * part.block_tokens
        first = next(self._found(numbers, places, num_tokens, bit), [])
        return first[0][0] if first else 0

    def _found(
        self, numbers: Sequence[int], places: Sequence[int], num_tokens: int, bits: int
    ) -> Iterator[list[Level]]:
        """See `levels`; of everybody, or of one worker."""
        parts: list[Boundaries] = []
        for needed, number in self._most_needed_first:
            if number not in numbers:
                continue
            part: Leading | Trailing
            if needed:
                group = self._groups[number]
                walk, layers = self._walks[group.block_tokens], self._layers(number, places)
                part = Trailing(group, partial(walk.runs, layers), num_tokens // group.block_tokens)
            else:
                part = self._leading(number, places)
            if bits != self._everybody:
                part = part.of_one(bits)
            num_tokens = min(num_tokens, part.num_blocks * part.block_tokens)
            if not num_tokens:  # as of what nobody has served yet
                return iter(())
            parts.append(part)
        if not parts:
            return iter(())
        step = lcm(*(part.block_tokens for part in parts))
        return levels(parts, step, num_tokens, bits)

    @cached_property
    def _most_needed_first(self) -> list[tuple[int, int]]:
        """First block needed and number of each group; who needs most says best how far to look."""
        return sorted((self._first_needed(number), number) for number in self._numbers)

    def _leading(self, number: int, places: Sequence[int]) -> Leading:
        """A group's blocks from the first one on; looked for once, though several ask."""
        known = self._leading_known.get((number, len(places)))
        if known is None:
            group = self._groups[number]
            walk = self._walks[group.block_tokens]
            layers = self._layers(number, places)
            known = Leading(group, *walk.leading(layers, self._everybody))
            self._leading_known[number, len(places)] = known
        return known

    def _layers(self, number: int, places: Sequence[int]) -> list[int]:
        return [place * len(self._groups) + number for place in places]

    def _first_needed(self, number: int) -> int:
        """Of a group the first block that a query after the prompt needs."""
        group = self._groups[number]
        num_blocks = self._walks[group.block_tokens].num_values
        return KINDS[group.kind].first_needed(group, num_blocks)

    def _loads(self, bit: int, usable: int, reach: int) -> tuple[tuple[int, int], ...]:
        """What a worker reads to go on later: each block from the first tier that has it."""
        blocks: Counter[int] = Counter()
        for number, group in enumerate(self._groups):
            end = reach // group.block_tokens
            # What a query needs of the blocks before, its pool has: it can go on there already.
            first = max(KINDS[group.kind].first_needed(group, end), usable // group.block_tokens)
            walk = self._walks[group.block_tokens]
            by_place = [
                narrowed(*walk.runs(self._layers(number, [place]), first, end), bit)
                for place in self._places
            ]
            begins = sorted({end}.union(*(starts for starts, _ in by_place)))
            for begin, after in pairwise(begins):
                for place, (starts, masks) in enumerate(by_place):
                    if masks[bisect_right(starts, begin) - 1]:
                        blocks[place] += after - begin
                        break
        del blocks[0]
        return tuple((place - 1, blocks[place]) for place in sorted(blocks))
