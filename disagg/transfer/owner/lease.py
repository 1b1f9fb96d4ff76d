"""One lease: what its table remembers of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from disagg.errors import InvariantViolation
from disagg.messages.identity import Attempt, Incarnation, LeaseRequest, RequestKey
from disagg.messages.peer import OfferedRange, Offers, Seal
from disagg.transfer.actions import LeaseListener
from disagg.transfer.owner.states import LeaseState

GroupBlocks = Sequence[Sequence[tuple[int, int]]]
"""Per group: (block index, block id) pairs."""


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
    """A lease and what it lists; changed by `LeaseTable` only."""

    lease_id: int
    key: RequestKey
    reader: Incarnation
    """The owner itself where there is none: somebody may take it over."""
    expires_ms: int
    listener: LeaseListener
    state: LeaseState = LeaseState.OPEN
    request: LeaseRequest | None = None
    """Of the reader; None where the owner opened it on a reservation."""
    is_pull: bool = False
    """A prefix pull: its key has no hand-over here, or another lease for it."""
    first_lacked: tuple[int, ...] = ()
    """Per group, index of the first block that its reader lacks; () where that is not needed."""
    ranges: list[OfferedRange] = field(default_factory=list)
    num_ready: int | None = None
    """How many of them the reader may know of, as their blocks' checksums are known; None: all, as
    none are computed."""
    checksums: list[int] = field(default_factory=list)
    """Of the first blocks of the ranges after those."""
    num_summing: int = 0
    """Blocks after these whose checksums are being computed."""
    offered: dict[int, set[int]] = field(default_factory=dict)
    """Per group the indexes of the blocks offered."""
    seal: Seal | None = None
    attempt: Attempt | None = None
    """The one that committed."""
    num_computed: int = 0
    """Tokens of the prefill, when it last went on without blocks to offer."""
    num_read: int = 0
    """Blocks that the reader has, as far as it is known."""

    @property
    def holder(self) -> tuple[str, RequestKey, int]:
        """Name of its hold in the block pool."""
        return ("lease", self.key, self.lease_id)

    @property
    def num_blocks(self) -> int:
        """Number of blocks offered and held."""
        return sum(map(len, self.offered.values()))

    @property
    def pull(self) -> LeaseRequest | None:
        """The request of a prefix pull; None for a hand-over."""
        return self.request if self.is_pull else None

    def status(self) -> LeaseStatus:
        """A copy of the lease's figures, for display."""
        return LeaseStatus(self.lease_id, self.key, self.reader, self.state, self.num_blocks)

    @property
    def num_offered(self) -> int:
        """Number of ranges that the reader may know of."""
        return len(self.ranges) if self.num_ready is None else self.num_ready

    @property
    def is_ready(self) -> bool:
        """Whether the reader may know of all that is offered, and of the seal."""
        return self.num_offered == len(self.ranges)

    def offers(self, first: int) -> Offers:
        """Ranges from a number on, and the seal if there is one, as far as the reader may know."""
        number = self._request_number
        return Offers(
            self.key,
            self.lease_id,
            first,
            tuple(self.ranges[first : self.num_offered]),
            self.seal if self.is_ready else None,
            request_number=number,
            num_computed_tokens=self.num_computed,
        )

    def dead(self) -> Offers:
        """The lease's end, for its reader."""
        number = self._request_number
        return Offers(self.key, self.lease_id, 0, dead=True, request_number=number)

    def close(
        self,
        num_groups: int,
        num_tokens: int,
        first_token_id: int | None = None,
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

    def add(self, blocks: GroupBlocks) -> None:
        """Number the ranges of blocks that are held for the reader."""
        for group, pairs in enumerate(blocks):
            if pairs:
                self.offered.setdefault(group, set()).update([index for index, _ in pairs])
                self.ranges += ranges_of(group, pairs)

    def check_new(self, blocks: GroupBlocks) -> None:
        """Check that no block is offered twice.

        Raises:
            InvariantViolation: one was offered before, or is named twice.
        """
        for group, pairs in enumerate(blocks):
            fresh = {index for index, _ in pairs}
            if len(fresh) < len(pairs) or not fresh.isdisjoint(self.offered.get(group, ())):
                raise InvariantViolation(f"{self.key}: a block of group {group} offered twice")

    def next_to_sum(self, blocks_max: int) -> list[int]:
        """The next blocks whose checksums are to be computed, while none are; counts them."""
        if self.is_ready or self.num_summing:
            return []
        wanted = len(self.checksums) + blocks_max
        blocks: list[int] = []
        for r in self.ranges[self.num_offered :]:
            blocks += range(r.block_id, r.block_id + min(r.num_blocks, wanted - len(blocks)))
            if len(blocks) == wanted:
                break
        blocks = blocks[len(self.checksums) :]
        self.num_summing = len(blocks)
        return blocks

    def take_checksums(self, checksums: Sequence[int]) -> bool:
        """Add those of the blocks from `next_to_sum`; whether a range is ready that was not."""
        assert self.num_ready is not None
        before, self.num_summing, first = self.num_ready, 0, 0
        known = [*self.checksums, *checksums]
        for number, r in enumerate(self.ranges[before:], before):
            end = first + r.num_blocks
            if end > len(known):
                break
            self.ranges[number] = replace(r, checksums=tuple(known[first:end]))
            self.num_ready, first = number + 1, end
        self.checksums = known[first:]
        return self.num_ready > before

    @property
    def num_summed(self) -> int:
        """Blocks whose checksums are known."""
        ready = self.ranges[: self.num_offered]
        return sum(r.num_blocks for r in ready) + len(self.checksums)

    def blocks_from(self, first_lacked: Sequence[int]) -> GroupBlocks:
        """The blocks offered, from a block index on in each group."""
        blocks: list[list[tuple[int, int]]] = [[] for _ in first_lacked]
        for r in self.ranges:
            pairs = ((r.block_index + i, r.block_id + i) for i in range(r.num_blocks))
            blocks[r.group] += [pair for pair in pairs if pair[0] >= first_lacked[r.group]]
        return blocks

    @property
    def _request_number(self) -> int | None:
        return self.request.number if self.request else None


def ranges_of(group: int, pairs: Iterable[tuple[int, int]]) -> list[OfferedRange]:
    """Coalesce blocks that are adjacent both in the request and in the pool."""
    ranges: list[OfferedRange] = []
    first = first_block = num_blocks = 0
    for block_index, block in pairs:
        if block_index == first + num_blocks and block == first_block + num_blocks and num_blocks:
            num_blocks += 1
            continue
        if num_blocks:
            ranges.append(OfferedRange(group, first, first_block, num_blocks))
        first, first_block, num_blocks = block_index, block, 1
    if num_blocks:
        ranges.append(OfferedRange(group, first, first_block, num_blocks))
    return ranges
