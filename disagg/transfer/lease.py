"""One lease: what its table remembers of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from disagg.messages.identity import Attempt, Incarnation, Question, RequestKey
from disagg.messages.peer import OfferedRange, Offers, Seal
from disagg.transfer.lease_states import LeaseState

GroupBlocks = Sequence[Sequence[tuple[int, int]]]
"""Per group: (position, block id) pairs."""


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """One lease, for display."""

    lease_id: int
    key: RequestKey
    reader: Incarnation
    state: LeaseState
    num_blocks: int


@dataclass(slots=True)
class Lease:
    """Changed by `LeaseTable` only."""

    lease_id: int
    key: RequestKey
    reader: Incarnation
    expires_ms: int
    state: LeaseState = LeaseState.OPEN
    question: Question | None = None
    """What the reader asked for it with; None where the owner opened it on a reservation."""
    is_pull: bool = False
    """A prefix pull: its key has no hand-over here, or another lease for it."""
    first_lacked: tuple[int, ...] = ()
    """Per group, the first position that its reader lacks; () where nobody asks."""
    ranges: list[OfferedRange] = field(default_factory=list)
    offered: dict[int, set[int]] = field(default_factory=dict)
    """Per group the positions of the blocks offered."""
    seal: Seal | None = None
    attempt: Attempt | None = None
    """The one that committed."""

    @property
    def holder(self) -> tuple[str, RequestKey, int]:
        """Name of its hold in the block pool."""
        return ("lease", self.key, self.lease_id)

    @property
    def num_blocks(self) -> int:
        """Blocks offered and held."""
        return sum(map(len, self.offered.values()))

    @property
    def pull(self) -> Question | None:
        """The question of a prefix pull."""
        return self.question if self.is_pull else None

    @property
    def number(self) -> int:
        """Of the question; 0 without one."""
        return self.question.number if self.question else 0

    def status(self) -> LeaseStatus:
        """As it stands now."""
        return LeaseStatus(self.lease_id, self.key, self.reader, self.state, self.num_blocks)

    def offers(self, first: int) -> Offers:
        """Ranges from a number on, and the seal if there is one."""
        ranges = tuple(self.ranges[first:])
        return Offers(self.key, self.lease_id, first, ranges, seal=self.seal, number=self.number)

    def dead(self) -> Offers:
        """What its reader is told in the end."""
        return Offers(self.key, self.lease_id, 0, dead=True, number=self.number)

    def close(
        self,
        num_groups: int,
        num_tokens: int,
        first_token_id: int = -1,
        first_logprob: float = 0.0,
        first_top_logprobs: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """Count the ranges and seal the list."""
        counts = [0] * num_groups
        for offered in self.ranges:
            counts[offered.group] += 1
        self.seal = Seal(
            num_tokens, tuple(counts), first_token_id, first_logprob, first_top_logprobs
        )

    def blocks_from(self, first_lacked: Sequence[int]) -> GroupBlocks:
        """The blocks offered, from a position on in each group."""
        blocks: list[list[tuple[int, int]]] = [[] for _ in first_lacked]
        for r in self.ranges:
            pairs = ((r.position + i, r.block_id + i) for i in range(r.num_blocks))
            blocks[r.group] += [pair for pair in pairs if pair[0] >= first_lacked[r.group]]
        return blocks


def ranges_of(group: int, pairs: Iterable[tuple[int, int]]) -> list[OfferedRange]:
    """Coalesce blocks that are adjacent both in the request and in the pool."""
    ranges: list[OfferedRange] = []
    first = first_block = num_blocks = 0
    for position, block in pairs:
        if position == first + num_blocks and block == first_block + num_blocks and num_blocks:
            num_blocks += 1
            continue
        if num_blocks:
            ranges.append(OfferedRange(group, first, first_block, num_blocks))
        first, first_block, num_blocks = position, block, 1
    if num_blocks:
        ranges.append(OfferedRange(group, first, first_block, num_blocks))
    return ranges
