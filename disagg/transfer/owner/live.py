"""Leases that hold blocks, from their creation to their end."""

from collections.abc import Collection, Sequence

from disagg.messages.identity import Incarnation, LeaseRequest, RequestKey
from disagg.transfer.actions import BlockHolds, LeaseEnded, LeaseListener, Outbox, Send
from disagg.transfer.checksums import Checksums
from disagg.transfer.owner.committed import CommittedLeases
from disagg.transfer.owner.lease import GroupBlocks, Lease, LeaseStatus
from disagg.transfer.owner.states import LEASE_TABLE, LeaseEvent, LeaseState


class LiveLeases:
    """Leases of this incarnation, and what holds for all of them: time to live, hold, end.

    The live ones are as many as the caller opens (one hand-over per key, one prefix pull per
    request); of the committed ones, whose hold is gone, at most ``committed_max`` are
    remembered.

    Args:
        me: this worker; lease ids count up within its epoch.
        holds: the block pool; a lease holds under ``("lease", key, lease_id)``.
        out: takes the messages to readers.
        ttl_ms: a lease dies when neither its owner nor its reader got on with it for so long.
        committed_max: committed leases remembered until the reader acknowledges.
        take_over_ms: a sealed hand-over whose reader is lost lives on so long; 0: not at all.
        checksums: computes those of the blocks offered; None: the offers carry none.
    """

    def __init__(
        self,
        me: Incarnation,
        holds: BlockHolds,
        out: Outbox,
        *,
        ttl_ms: int,
        committed_max: int,
        take_over_ms: int = 0,
        checksums: Checksums | None = None,
    ) -> None:
        self.me = me
        self.holds = holds
        self.out = out
        self._ttl_ms = ttl_ms
        self._last_id = 0
        # Every refresh adds the same ttl, so insertion order is the order of expiry: an exactly
        # bounded stand-in for a heap. `_by_key` is in order of opening.
        self._live: dict[int, Lease] = {}
        self._by_key: dict[RequestKey, int] = {}
        self._committed = CommittedLeases(committed_max)
        self._take_over_ms = take_over_ms
        self._checksums = checksums
        self._orphans: dict[int, int] = {}
        """Deadlines of live leases without a reader, in order."""

    def create(
        self,
        now_ms: int,
        key: RequestKey,
        reader: Incarnation,
        event: LeaseEvent,
        blocks: GroupBlocks,
        listener: LeaseListener,
        request: LeaseRequest | None = None,
    ) -> Lease:
        """A new live lease, born by ``event``, which holds and lists ``blocks``."""
        self._last_id += 1
        lease = Lease(
            self._last_id,
            key,
            reader,
            now_ms + self._ttl_ms,
            listener,
            LEASE_TABLE.born(event),
            request,
            num_ready=None if self._checksums is None else 0,
        )
        self.holds.hold(lease.holder, ())
        self._live[lease.lease_id] = lease
        self._take(lease, blocks)
        return lease

    def is_hand_over(self, lease: Lease) -> None:
        """Make the lease the live one of its generation."""
        self._by_key[lease.key] = lease.lease_id

    def find(self, lease_id: int) -> Lease | None:
        """A lease that is live, or committed and remembered."""
        return self._live.get(lease_id) or self._committed.find(lease_id)

    @property
    def handed_over(self) -> Collection[RequestKey]:
        """Generations whose hand-over has a live lease."""
        return self._by_key.keys()

    def hand_over_of(self, key: RequestKey) -> Lease | None:
        """The live lease of a generation's hand-over."""
        lease_id = self._by_key.get(key)
        return None if lease_id is None else self._live[lease_id]

    def die(self, lease: Lease, event: LeaseEvent, reason: str) -> None:
        """End a lease: dead first, reused after; nobody can commit it when its blocks go."""
        lease.state = LEASE_TABLE.move(lease.state, event)
        self._no_longer_live(lease)
        LEASE_TABLE.leave(lease.state, LeaseEvent.FORGET)
        self.holds.drop(lease.holder)
        lease.listener.lease_ended(LeaseEnded(lease.key, lease.lease_id, reason, lease.pull))
        if event is not LeaseEvent.READER_LOST and lease.reader != self.me:
            self.out.add(Send(lease.reader, lease.dead()))

    def expire(self, now_ms: int) -> None:
        """End the leases whose time to live is over, or whose reader nobody replaced in time."""
        for lease_id in [one for one, until_ms in self._orphans.items() if until_ms <= now_ms]:
            self.die(self._live[lease_id], LeaseEvent.EXPIRE, "nobody took it over")
        while self._live and (lease := next(iter(self._live.values()))).expires_ms <= now_ms:
            self.die(lease, LeaseEvent.EXPIRE, "expired")

    def next_expiry_ms(self) -> int | None:
        """When `expire` has something to do; None if there is no live lease."""
        first = next((lease.expires_ms for lease in self._live.values()), None)
        due = [*self._orphans.values(), *(() if first is None else (first,))]
        return min(due, default=None)

    # -- what the caller sees -----------------------------------------------------------------

    def knows(self, key: RequestKey) -> bool:
        """Whether a lease of the generation is live, or committed and remembered."""
        return key in self._by_key or any(one.key == key for one in self._committed)

    def statuses(self) -> list[LeaseStatus]:
        """Statuses of all leases, live ones first."""
        return [one.status() for one in (*self._live.values(), *self._committed)]

    @property
    def num_live(self) -> int:
        """Number of leases that hold blocks."""
        return len(self._live)

    @property
    def num_blocks_held(self) -> int:
        """Holds of all live leases; a block under two leases counts twice."""
        return sum(lease.num_blocks for lease in self._live.values())

    # -- inside -------------------------------------------------------------------------------

    def _take(self, lease: Lease, blocks: GroupBlocks) -> bool:
        """Hold, then list; False if there is nothing to take."""
        taken = [block for pairs in blocks for _, block in pairs]
        if not taken:
            return False
        lease.check_new(blocks)
        self.holds.add_to_hold(lease.holder, taken)
        lease.add(blocks)
        self._sum_next(lease)
        return True

    def _sum_next(self, lease: Lease) -> None:
        """Have the next checksums of a lease computed, a piece at a time: the leases take turns."""
        if self._checksums is None:
            return
        if blocks := lease.next_to_sum(self._checksums.blocks_max):
            self._checksums.compute(self, lease.lease_id, blocks)

    def summed(self, now_ms: int, subject: int, checksums: Sequence[int]) -> None:
        """Checksums of blocks of a lease are known; nothing if it is not live any more."""
        lease = self._live.get(subject)
        if lease is None:
            return
        state = LEASE_TABLE.move(lease.state, LeaseEvent.SUMMED)
        first = lease.num_offered
        is_news = lease.take_checksums(checksums)
        self._sum_next(lease)
        if state is not LeaseState.ORPHANED:
            self._refresh(now_ms, lease, state)
            if is_news:
                self.tell(lease, first)

    def tell(self, lease: Lease, first: int) -> None:
        """Send a lease's ranges from a number on, those that wait for their checksums excepted.

        A lease that was requested is sent as a whole, or not yet.
        """
        if lease.is_ready or (lease.request is None and lease.num_offered > first):
            self.out.add(Send(lease.reader, lease.offers(0 if lease.request else first)))

    def _refresh(self, now_ms: int, lease: Lease, state: LeaseState) -> None:
        lease.state = state
        lease.expires_ms = now_ms + self._ttl_ms
        self._live[lease.lease_id] = self._live.pop(lease.lease_id)

    def _orphan(self, now_ms: int, lease: Lease) -> None:
        lease.state = LEASE_TABLE.move(lease.state, LeaseEvent.ORPHAN)
        self._orphans[lease.lease_id] = now_ms + self._take_over_ms

    def _no_longer_live(self, lease: Lease) -> None:
        del self._live[lease.lease_id]
        self._orphans.pop(lease.lease_id, None)
        if self._by_key.get(lease.key) == lease.lease_id:
            del self._by_key[lease.key]
