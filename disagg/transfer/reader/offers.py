"""What a reader knows of a lease's offers, and what of its destinations is still missing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from disagg.errors import InvariantViolation
from disagg.messages.peer import OfferedRange, Offers, Seal
from disagg.transfer.reader.parts import Part, Parts


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks to pull: of one group, consecutive in the request and in the owner's pool."""

    group: int
    block_index: int
    """Of the first block, in its request."""
    src: int
    dst: tuple[int, ...]
    """A block of ours for each; they need not be adjacent."""
    pair: int | None = None
    """Of one block that is read in part: which part, see `Part`; ``block_index`` is ours then."""
    checksums: tuple[int, ...] = ()
    """Of each block at the owner; () where none are compared."""

    @property
    def sources(self) -> range:
        """Block ids at the owner."""
        return range(self.src, self.src + len(self.dst))

    @property
    def places(self) -> list[tuple[int, int]]:
        """(group, block index) of each block."""
        return [(self.group, self.block_index + i) for i in range(len(self.dst))]

    def cut(self, num_blocks: int) -> tuple["Run", "Run"]:
        """The first so many blocks, and the others."""
        head, tail = self.checksums[:num_blocks], self.checksums[num_blocks:]
        first = Run(self.group, self.block_index, self.src, self.dst[:num_blocks], self.pair, head)
        after = (self.block_index + num_blocks, self.src + num_blocks, self.dst[num_blocks:])
        return first, Run(self.group, *after, self.pair, tail)


def in_pieces(runs: Sequence[Run], num_blocks_max: int) -> Iterator[tuple[Run, ...]]:
    """The runs in order, in pieces of at most so many blocks."""
    piece: list[Run] = []
    room = num_blocks_max
    for run in runs:
        rest = run
        while len(rest.dst) >= room:
            head, rest = rest.cut(room)
            yield (*piece, head)
            piece, room = [], num_blocks_max
        if rest.dst:
            piece.append(rest)
            room -= len(rest.dst)
    if piece:
        yield tuple(piece)


@dataclass(frozen=True, slots=True)
class ProtocolBreach:
    """What an owner did that the protocol forbids, and at which block, where known."""

    problem: str
    block: tuple[int, int] | None = None
    """(group, block index)."""


class OfferList:
    """The offers of one lease as they arrive, in the owner's numbering.

    Args:
        destinations: per group, (block index, block id) of every block that must be offered.
        surplus: per group, indexes of blocks that may be offered and are not read: the reader has
            got them by itself since it requested the lease.
        parts: where the owner's blocks are not ours: what is read of each, in place of ``surplus``.
        with_checksums: an offer without those of its blocks breaks the protocol.

    Raises:
        InvariantViolation: a destination is named twice.
    """

    def __init__(
        self,
        destinations: Sequence[Sequence[tuple[int, int]]],
        surplus: Sequence[Iterable[int]] = (),
        parts: Parts | None = None,
        with_checksums: bool = False,
    ) -> None:
        self.num_blocks = tuple(map(len, destinations))
        self.ranges: list[OfferedRange] = []
        self.seal: Seal | None = None
        self._missing = [dict(pairs) for pairs in destinations]
        if tuple(map(len, self._missing)) != self.num_blocks:
            raise InvariantViolation(f"a block is named twice: {destinations}")
        self.num_reads = sum(self.num_blocks)
        """Blocks, or parts of blocks, that are read when all is offered."""
        self._parts: list[dict[int, tuple[Part, ...]]] = []
        """Per group, by the owner's block index; of an owner with equal blocks empty."""
        if parts is not None:
            self._parts = [dict(one) for one in parts.by_block]
            self._missing = [dict.fromkeys(one, 0) for one in self._parts]
            self.num_reads = parts.num_parts
            surplus = parts.surplus
        self._surplus = [set(indexes) for indexes in surplus] or [set() for _ in destinations]
        self._num_ranges = [0] * len(destinations)
        self._with_checksums = with_checksums

    def take(self, offers: Offers) -> list[Run] | ProtocolBreach:
        """Add what is new; returns the blocks to pull for it. Repetitions add nothing.

        Offers beyond a gap must not be given; check `has_gap` first.
        """
        repeated = len(self.ranges) - offers.first
        seen = self.ranges[max(0, offers.first) : offers.first + len(offers.ranges)]
        contradicts = self.seal and offers.seal and offers.seal != self.seal
        if offers.first < 0 or seen != list(offers.ranges[:repeated]) or contradicts:
            return ProtocolBreach("an offer contradicts an earlier one")
        runs: list[Run] = []
        for offered in offers.ranges[repeated:]:
            problem = self._claim(offered, runs)
            if problem:
                return ProtocolBreach(problem, (offered.group, offered.block_index))
        self.seal = self.seal or offers.seal
        return runs

    def has_gap(self, offers: Offers) -> bool:
        """Whether offers before these are not known."""
        return offers.first > len(self.ranges)

    @property
    def all_listed(self) -> bool:
        """Whether the seal and at least as many offers as it counts are known."""
        return self.seal is not None and len(self.ranges) >= sum(self.seal.num_ranges)

    @property
    def num_ranges(self) -> tuple[int, ...]:
        """Number of offered ranges per group."""
        return tuple(self._num_ranges)

    def incomplete(self, seal: Seal) -> ProtocolBreach | None:
        """What of the seal's counts or of the destinations is not met."""
        if seal.num_ranges != self.num_ranges:
            return ProtocolBreach("the seal's counts are not those of the offers")
        for group, missing in enumerate(self._missing):
            if missing:
                problem = "sealed without a destination's block"
                return ProtocolBreach(problem, (group, min(missing)))
        return None

    def _claim(self, offered: OfferedRange, runs: list[Run]) -> str:
        if not 0 <= offered.group < len(self._missing) or offered.num_blocks < 1:
            return "an offer names no group or no blocks"
        if self._with_checksums and len(offered.checksums) != offered.num_blocks:
            return "an offer has not the checksum of each of its blocks"
        missing, surplus = self._missing[offered.group], self._surplus[offered.group]
        first = offered.block_index
        indexes = range(first, first + offered.num_blocks)
        dst: list[int] = []
        try:
            if self._parts:
                for index in indexes:
                    if index in surplus:
                        surplus.remove(index)
                    else:
                        missing.pop(index)
                        self._add_parts(offered, index, runs)
            elif surplus:
                for index in indexes:
                    if index in surplus:
                        surplus.remove(index)
                        self._add_run(offered, first, dst, runs)
                        first, dst = index + 1, []
                    else:
                        dst.append(missing.pop(index))
            else:  # nearly every offer, at half the cost
                dst.extend(map(missing.pop, indexes))
        except KeyError as unknown:
            return f"block {unknown} is no destination, or was offered twice"
        self._add_run(offered, first, dst, runs)
        self.ranges.append(offered)
        self._num_ranges[offered.group] += 1
        return ""

    def _add_parts(self, offered: OfferedRange, index: int, runs: list[Run]) -> None:
        src = offered.block_id + index - offered.block_index
        runs += [
            Run(offered.group, part.block_index, src, (part.block,), part.pair)
            for part in self._parts[offered.group][index]
        ]

    def _add_run(
        self, offered: OfferedRange, first: int, dst: Sequence[int], runs: list[Run]
    ) -> None:
        if dst:
            at = first - offered.block_index
            checksums = offered.checksums[at : at + len(dst)] if self._with_checksums else ()
            src = offered.block_id + at
            runs.append(Run(offered.group, first, src, tuple(dst), checksums=checksums))
