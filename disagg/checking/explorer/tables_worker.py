"""A worker whose transfer tables are driven past its scheduler, for what schedulers never do.

No scheduler gives one generation to the same two workers twice. Here a lease is opened, offered and
ended, a transfer begun and given up, again under the same key and at any moment.
"""

from typing import Any

from disagg.messages.identity import Incarnation, RequestKey
from disagg.scheduling.actions import WorkerAction
from disagg.scheduling.core import WorkerCore
from disagg.transfer.actions import InboundCommitted, InboundPartial

KEY = RequestKey("r", 1)
NUM_BLOCKS = 2


class TablesWorker(WorkerCore):
    """An owner that opens leases, or a reader that begins transfers, and listens to them itself.

    Attributes:
        owns: it is the owner.
        tries_left: leases that it may still open, or transfers that it may begin.
    """

    owns: bool
    tries_left: int
    _placed: tuple[int, ...] = ()
    """The owner's block per position, or the reader's destination."""
    _lease_id = _num_offered = 0
    _valid: tuple[int, ...] = ()
    """Positions of the last transfer that are right."""

    def seen(self) -> dict[str, Any]:
        """What a world sees of it and of no scheduler."""
        prefills = "prefill" in self.kv.pool.holders()
        placed = [(block, f"KV {position}") for position, block in enumerate(self._placed)]
        return {
            "cached": tuple((placed[one][1], placed[one][0]) for one in self._valid),
            "computed": tuple(placed) if prefills else (),
            "own_moves": tuple(self._own_moves(prefills)),
        }

    def _own_moves(self, prefills: bool) -> list[str]:
        if self.leases.num_live:
            return ["offer"] if prefills else []
        if self.inbound.num_live:
            return ["abort"]
        may_begin = self.tries_left and self.kv.pool.num_free == NUM_BLOCKS
        return ["open" if self.owns else "begin"] if may_begin else []

    def open(self, now_ms: int, reader: Incarnation) -> list[WorkerAction]:
        """A prefill begins; every second one gets its blocks the other way round."""
        self._take_blocks("prefill")
        self._num_offered = 0
        self._lease_id = self.leases.open(now_ms, KEY, reader, self)
        return self._out.take()

    def offer(self, now_ms: int, reader: Incarnation) -> list[WorkerAction]:
        """The next block is offered; with the last one the lease is sealed."""
        position, lease_id = self._num_offered, self._lease_id
        self._num_offered += 1
        blocks = (((position, self._placed[position]),),)
        if self._num_offered < NUM_BLOCKS:
            self.leases.offer(now_ms, lease_id, blocks)
        else:
            self.leases.seal(now_ms, lease_id, blocks, NUM_BLOCKS)
            self.kv.pool.drop("prefill")
        return self._out.take()

    def begin(self, now_ms: int, owner: Incarnation) -> list[WorkerAction]:
        """A transfer begins; what the last one brought is overwritten."""
        self._valid = ()
        self._take_blocks("reader")
        self.inbound.begin(now_ms, KEY, owner, (tuple(enumerate(self._placed)),), self)
        self.kv.pool.drop("reader")
        return self._out.take()

    def abort(self, now_ms: int, owner: Incarnation) -> list[WorkerAction]:
        """The transfer is given up."""
        self.inbound.abort(KEY)
        return self._out.take()

    def _take_blocks(self, holder: str) -> None:
        self.tries_left -= 1
        blocks = self.kv.pool.allocate(NUM_BLOCKS)
        self.kv.pool.hold(holder, blocks)
        self.kv.pool.release(blocks)
        self._placed = tuple(sorted(blocks, reverse=self.tries_left % 2 > 0 and self.owns))

    # -- listener of its tables ---------------------------------------------------------------

    def committed(self, now_ms: int, event: InboundCommitted) -> None:
        """All of the transfer must be right."""
        self._valid = tuple(range(NUM_BLOCKS))
        self.inbound.finish(KEY)

    def partly_committed(self, now_ms: int, event: InboundPartial) -> None:
        """All that the news does not name must be right."""
        self._valid = tuple(one for one in range(NUM_BLOCKS) if (0, one) not in event.failed)
        self.inbound.finish(KEY)

    def lease_ended(self, event: object) -> None:
        """The prefill ends with its lease."""
        self.kv.pool.drop("prefill")

    def _nothing(self, *news: object) -> None:
        """The rest changes nothing."""

    progressed = failed = drained = lease_committed = _nothing
