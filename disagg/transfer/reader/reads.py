"""The READs in progress of a worker, and which of them are stuck."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from disagg.messages.identity import Incarnation, RequestKey
from disagg.transfer.actions import Outbox, PostRead
from disagg.transfer.reader.offers import Run, in_pieces


@dataclass(frozen=True, slots=True)
class Read:
    """One READ in progress."""

    inbound: int
    """Serial of the inbound transfer whose destinations it writes."""
    owner: Incarnation
    runs: tuple[Run, ...]
    posted_ms: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the READ writes."""
        return sum(len(run.dst) for run in self.runs)

    @property
    def dst(self) -> tuple[int, ...]:
        """The blocks that it writes."""
        return tuple(chain.from_iterable(run.dst for run in self.runs))

    @property
    def places(self) -> list[tuple[int, int]]:
        """(group, block index) of each block."""
        return [place for run in self.runs for place in run.places]

    def differing(self, checksums: Sequence[int]) -> list[tuple[int, int]]:
        """(group, block index) of the blocks that have other checksums than they were offered with.

        Args:
            checksums: of the blocks that the READ wrote.
        """
        offered = chain.from_iterable(run.checksums for run in self.runs)
        pairs = zip(self.places, offered, checksums, strict=True)
        return [place for place, theirs, ours in pairs if theirs != ours]

    @property
    def first(self) -> tuple[int, int]:
        """(group, block index) of the block that stands for the READ where one is named."""
        return self.runs[0].group, self.runs[0].block_index

    def age(self, now_ms: int) -> str:
        """The READ and how long it is in progress, for the report that it is stuck."""
        group, block_index = self.first
        where = f"the READ of block {group}:{block_index} (group:block)"
        return f"{where} is in progress for {now_ms - self.posted_ms} ms"


@dataclass(slots=True)
class _Queue:
    """READs of one owner that are neither terminal nor stuck, in the order of their posting."""

    reads: dict[int, Read] = field(default_factory=dict)
    first_ms: int = 0
    """Since when the first of them is the first."""
    ended_ms: int = 0
    """When one of them ended last."""

    @property
    def since_ms(self) -> int:
        """Since when the first stands still."""
        return max(next(iter(self.reads.values())).posted_ms, self.first_ms)


class ReadsInProgress:
    """READs whose handles are not terminal; as many as the posted destinations allow.

    The transport takes the READs of an owner in order, so one that waits behind others stands still
    only since the last of those before it has ended.

    Args:
        out: takes the READs.
        blocks_max: blocks in one READ.
    """

    def __init__(self, out: Outbox, blocks_max: int) -> None:
        self._out = out
        self._blocks_max = blocks_max
        self._last_id = 0
        self._owner_of: dict[int, Incarnation] = {}
        """Of every READ in a queue."""
        self._queues: dict[Incarnation, _Queue] = {}
        self._stuck: dict[int, Read] = {}

    def post(
        self, now_ms: int, inbound: int, key: RequestKey, owner: Incarnation, runs: Sequence[Run]
    ) -> list[int]:
        """Post READs of blocks for the transfer with serial ``inbound``; returns their ids."""
        first = self._last_id + 1
        for piece in in_pieces(runs, self._blocks_max):
            self._last_id += 1
            queue = self._queues.setdefault(owner, _Queue())
            queue.reads[self._last_id] = Read(inbound, owner, piece, now_ms)
            self._owner_of[self._last_id] = owner
            src = tuple(chain.from_iterable(run.sources for run in piece))
            dst = queue.reads[self._last_id].dst
            parts = tuple((run.group, run.pair) for run in piece if run.pair is not None)
            self._out.add(PostRead(self._last_id, key, owner, src, dst, parts))
        return list(range(first, self._last_id + 1))

    def end(self, now_ms: int, read_id: int) -> tuple[Read, bool] | None:
        """A READ is terminal: returns it and whether its owner may be read from again now."""
        stuck = self._stuck.pop(read_id, None)
        if stuck is not None:
            return stuck, stuck.owner not in self.owners_stuck
        if read_id not in self._owner_of:
            return None
        queue = self._queues[self._owner_of[read_id]]
        if read_id == next(iter(queue.reads)):
            queue.first_ms = now_ms
        queue.ended_ms = now_ms
        return self._take(read_id), False

    def take_stuck(self, since_ms: int) -> list[Read]:
        """Mark the READs that stand still since ``since_ms`` or longer; returns the new ones.

        Behind a stuck one, READs of its owner stand still since the last of them has ended.
        """
        found: dict[int, Read] = {}
        for queue in self._queues.values():
            if queue.since_ms > since_ms:
                continue
            first = next(iter(queue.reads))
            found |= {
                read_id: read
                for read_id, read in queue.reads.items()
                if read_id == first or max(read.posted_ms, queue.ended_ms) <= since_ms
            }
            queue.first_ms = queue.ended_ms
        for read_id in sorted(found):
            self._stuck[read_id] = self._take(read_id)
        return list(found.values())

    def _take(self, read_id: int) -> Read:
        owner = self._owner_of.pop(read_id)
        queue = self._queues[owner]
        read = queue.reads.pop(read_id)
        if not queue.reads:
            del self._queues[owner]
        return read

    @property
    def owners_stuck(self) -> frozenset[Incarnation]:
        """Owners of stuck READs."""
        return frozenset(read.owner for read in self._stuck.values())

    @property
    def inbounds_stuck(self) -> frozenset[int]:
        """Serials of the transfers with stuck READs."""
        return frozenset(read.inbound for read in self._stuck.values())

    @property
    def oldest_ms(self) -> int | None:
        """Since when a READ that is not stuck yet stands still, of the one that does longest."""
        return min((queue.since_ms for queue in self._queues.values()), default=None)
