"""What the transfer tables want done and what they report, in one list."""

from disagg.messages.identity import RequestKey
from disagg.transfer.actions import (
    Command,
    InboundCommitted,
    InboundDrained,
    InboundFailed,
    InboundPartial,
    LeaseCommitted,
    LeaseEnded,
)

News = (
    LeaseCommitted | LeaseEnded | InboundCommitted | InboundPartial | InboundFailed | InboundDrained
)


class TableNews:
    """Outbox and listener of tables that are looked at by themselves."""

    def __init__(self) -> None:
        self._said: list[Command | News] = []

    def take(self) -> list[Command | News]:
        """Everything since the last call, in order."""
        said, self._said = self._said, []
        return said

    def add(self, command: Command, /) -> None:
        """As the outbox."""
        self._said.append(command)

    def lease_committed(self, event: LeaseCommitted) -> None:
        """As a lease's listener."""
        self._said.append(event)

    def lease_ended(self, event: LeaseEnded) -> None:
        """As a lease's listener."""
        self._said.append(event)

    def progressed(self, now_ms: int, key: RequestKey) -> None:
        """As an inbound transfer's listener; every command shows it anyway."""

    def committed(self, now_ms: int, event: InboundCommitted) -> None:
        """As an inbound transfer's listener."""
        self._said.append(event)

    def partly_committed(self, now_ms: int, event: InboundPartial) -> None:
        """As an inbound transfer's listener."""
        self._said.append(event)

    def failed(self, now_ms: int, event: InboundFailed) -> None:
        """As an inbound transfer's listener."""
        self._said.append(event)

    def drained(self, event: InboundDrained) -> None:
        """As an inbound transfer's listener."""
        self._said.append(event)
