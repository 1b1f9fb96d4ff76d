"""Committed leases, remembered until their readers know of the commit."""

from collections.abc import Iterator

from disagg.messages.identity import Incarnation
from disagg.messages.peer import CommitSeen
from disagg.transfer.owner.lease import Lease
from disagg.transfer.owner.states import LEASE_TABLE, LeaseEvent


class CommittedLeases:
    """The last committed leases, whose holds are gone: a repeated Commit is confirmed again.

    Args:
        leases_max: how many are remembered.
    """

    def __init__(self, leases_max: int) -> None:
        self._leases_max = leases_max
        self._leases: dict[int, Lease] = {}

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)

    def find(self, lease_id: int) -> Lease | None:
        """The committed lease with this id, if it is remembered."""
        return self._leases.get(lease_id)

    def add(self, lease: Lease) -> None:
        """Remember a lease; the oldest beyond the bound are forgotten."""
        self._leases[lease.lease_id] = lease
        while len(self._leases) > self._leases_max:
            self._forget(next(iter(self._leases.values())), LeaseEvent.CROWDED_OUT)

    def on_seen(self, sender: Incarnation, seen: CommitSeen) -> None:
        """Forget a lease whose reader got the confirmation."""
        lease = self._leases.get(seen.lease_id)
        whose = (sender, seen.key, seen.attempt)
        if lease is not None and whose == (lease.reader, lease.key, lease.attempt):
            self._forget(lease, LeaseEvent.SEEN)

    def on_peer_lost(self, reader: Incarnation) -> None:
        """Forget the leases of a reader that is gone."""
        for lease in [one for one in self._leases.values() if one.reader == reader]:
            self._forget(lease, LeaseEvent.READER_LOST)

    def _forget(self, lease: Lease, event: LeaseEvent) -> None:
        LEASE_TABLE.leave(lease.state, event)
        del self._leases[lease.lease_id]
