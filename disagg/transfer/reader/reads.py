"""The READs in progress of a worker, and which of them are stuck."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    def first(self) -> tuple[int, int]:
        """(group, block index) of the block that stands for the READ where one is named."""
        return self.runs[0].group, self.runs[0].block_index

    @property
    def stuck(self) -> str:
        """The READ and its age, for whoever hears that it is stuck."""
        group, block_index = self.first
        where = f"the READ of block {group}:{block_index} (group:block)"
        return f"{where} is in progress since {self.posted_ms} ms"


class ReadsInProgress:
    """READs whose handles are not terminal; as many as the posted destinations allow.

    Args:
        out: takes the READs.
        blocks_max: blocks in one READ.
    """

    def __init__(self, out: Outbox, blocks_max: int) -> None:
        self._out = out
        self._blocks_max = blocks_max
        self._last_id = 0
        self._moving: dict[int, Read] = {}
        """In the order of their posting."""
        self._stuck: dict[int, Read] = {}

    def post(
        self, now_ms: int, inbound: int, key: RequestKey, owner: Incarnation, runs: Sequence[Run]
    ) -> list[int]:
        """Post READs of blocks for the transfer with serial ``inbound``; returns their ids."""
        first = self._last_id + 1
        for piece in in_pieces(runs, self._blocks_max):
            self._last_id += 1
            self._moving[self._last_id] = Read(inbound, owner, piece, now_ms)
            src = tuple(chain.from_iterable(run.sources for run in piece))
            dst = tuple(chain.from_iterable(run.dst for run in piece))
            self._out.add(PostRead(self._last_id, key, owner, src, dst))
        return list(range(first, self._last_id + 1))

    def end(self, read_id: int) -> tuple[Read, bool] | None:
        """A READ is terminal: returns it and whether its owner may be read from again now."""
        stuck = self._stuck.pop(read_id, None)
        read = stuck or self._moving.pop(read_id, None)
        if read is None:
            return None
        return read, stuck is not None and read.owner not in self.owners_stuck

    def take_stuck(self, posted_ms: int) -> list[Read]:
        """Mark the READs posted at or before ``posted_ms`` as stuck; returns the new ones."""
        found: list[Read] = []
        while self._moving:
            read_id, read = next(iter(self._moving.items()))
            if read.posted_ms > posted_ms:
                break
            self._stuck[read_id] = self._moving.pop(read_id)
            found.append(read)
        return found

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
        """When the oldest READ that is not stuck yet was posted."""
        return next((read.posted_ms for read in self._moving.values()), None)
