"""The reader's requests for leases: repeat until answered, wait a bounded time, withdraw."""

from dataclasses import dataclass, replace

from disagg.errors import InvariantViolation
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import (
    AskLease,
    LeaseLoading,
    LeaseRefused,
    Offers,
    TakeOver,
    WithdrawLease,
)
from disagg.transfer.actions import READ_FAULTS, LeaseRequester, Outbox, Send
from disagg.transfer.reader.states import (
    LEASE_REQUEST_TABLE,
    LeaseRequestEvent,
    LeaseRequestState,
)
from disagg.transfer.reader.table import InboundTable


@dataclass(slots=True)
class _Request:
    owner: Incarnation
    message: AskLease | TakeOver
    requester: LeaseRequester
    expires_ms: int
    repeat_ms: int
    num_loaded: int = 0
    """Blocks that a tier of the owner has brought for it."""
    state: LeaseRequestState = LeaseRequestState.WAITING


class LeaseRequests:
    """Requests of this incarnation, at most one per generation.

    Args:
        inbound: reads the leases that were granted.
        out: takes the messages to owners.
        timeout_ms: a request that is not answered by then counts as refused; a `LeaseLoading` with
            more blocks than before renews it.
        ttl_ms: a granted lease is given up when its transfer stands still for so long.
        repeat_ms: a request is repeated at this interval until it is answered.
    """

    def __init__(
        self,
        inbound: InboundTable,
        out: Outbox,
        *,
        timeout_ms: int,
        ttl_ms: int,
        repeat_ms: int,
    ) -> None:
        self._inbound = inbound
        self._out = out
        self._timeout_ms = timeout_ms
        self._ttl_ms = ttl_ms
        self._repeat_ms = repeat_ms
        self._last_number = 0
        """Counts up over all generations, so that nothing is kept per generation."""
        self._entries: dict[RequestKey, _Request] = {}

    def ask(
        self,
        now_ms: int,
        owner: Incarnation,
        message: AskLease | TakeOver,
        requester: LeaseRequester,
    ) -> None:
        """Send a request under a new number, which takes the place of the message's.

        ``requester`` gets the answer, or the news that there is none.

        Raises:
            InvariantViolation: an earlier request of the generation is not over.
        """
        if message.key in self._entries:
            raise InvariantViolation(f"{message.key} has a request for a lease already")
        self._last_number += 1
        numbered = replace(message, number=self._last_number)
        self._entries[message.key] = _Request(
            owner, numbered, requester, now_ms + self._timeout_ms, now_ms + self._repeat_ms
        )
        self._out.add(Send(owner, numbered))

    def on_offers(self, now_ms: int, sender: Incarnation, offers: Offers) -> None:
        """A lease of a request: its grant, a repetition, more of it, or its end."""
        entry = self._current(sender, offers.key, offers.request_number)
        if entry is None:
            self._decline(sender, offers)
            return
        event = LeaseRequestEvent.NONE if offers.dead else LeaseRequestEvent.LEASE
        if entry.state is LeaseRequestState.GRANTED:
            LEASE_REQUEST_TABLE.move(entry.state, event)
            self._inbound.on_offers(now_ms, sender, offers)
        elif offers.dead:
            self._refused(now_ms, offers.key, entry)
        else:
            entry.state = LEASE_REQUEST_TABLE.move(entry.state, event)
            entry.expires_ms = now_ms + self._ttl_ms
            entry.requester.lease_granted(now_ms, sender, offers)

    def on_loading(self, now_ms: int, sender: Incarnation, loading: LeaseLoading) -> None:
        """A tier brings what was asked for: as long as more comes, the answer is waited for."""
        entry = self._current(sender, loading.key, loading.request_number)
        if entry is None or entry.state is not LeaseRequestState.WAITING:
            return
        if loading.num_blocks > entry.num_loaded:
            entry.state = LEASE_REQUEST_TABLE.move(entry.state, LeaseRequestEvent.LOADING)
            entry.num_loaded = loading.num_blocks
            entry.expires_ms = now_ms + self._timeout_ms

    def on_refused(self, now_ms: int, sender: Incarnation, refused: LeaseRefused) -> None:
        """The owner has no lease for a request; one that is being read ends by itself."""
        entry = self._current(sender, refused.key, refused.request_number)
        if entry is not None and entry.state is LeaseRequestState.WAITING:
            self._refused(now_ms, refused.key, entry)

    def give_up(self, key: RequestKey, reason: str = "") -> None:
        """Withdraw a request, answered or not; nothing if there is none.

        The withdrawal carries a ``reason`` that is one of `READ_FAULTS`, and no other.
        """
        if key in self._entries:
            self._withdraw(key, LeaseRequestEvent.GIVE_UP, reason if reason in READ_FAULTS else "")

    def renew(self, now_ms: int, key: RequestKey) -> None:
        """The transfer of a granted lease goes on; nothing if there is no such request."""
        entry = self._entries.get(key)
        if entry is not None and entry.state is LeaseRequestState.GRANTED:
            entry.expires_ms = now_ms + self._ttl_ms

    def finished(self, key: RequestKey) -> None:
        """Forget the request of a committed lease."""
        self._leave(key, LeaseRequestEvent.FINISH)

    def on_peer_lost(self, now_ms: int, owner: Incarnation) -> None:
        """An owner is gone: what it had not answered is refused; a READ fails by itself."""
        lost = [(key, one) for key, one in self._entries.items() if one.owner == owner]
        for key, _ in lost:
            self._leave(key, LeaseRequestEvent.PEER_LOST)
        for key, one in lost:
            if one.state is LeaseRequestState.WAITING:
                one.requester.lease_refused(now_ms, key, "peer_lost", f"{owner} is gone")

    def tick(self, now_ms: int) -> None:
        """Repetitions and time-outs that are due."""
        for key, entry in list(self._entries.items()):
            if entry.expires_ms <= now_ms:
                self._withdraw(key, LeaseRequestEvent.TIME_OUT)
                entry.requester.lease_refused(now_ms, key, "timeout", _cause(entry))
            elif entry.state is LeaseRequestState.WAITING and entry.repeat_ms <= now_ms:
                LEASE_REQUEST_TABLE.move(entry.state, LeaseRequestEvent.REPEAT)
                entry.repeat_ms = now_ms + self._repeat_ms
                self._out.add(Send(entry.owner, entry.message))

    def next_deadline_ms(self) -> int | None:
        """When `tick` has something to do; None if no request is open."""
        return min(
            (
                min(one.expires_ms, one.repeat_ms)
                if one.state is LeaseRequestState.WAITING
                else one.expires_ms
                for one in self._entries.values()
            ),
            default=None,
        )

    # -- inside -------------------------------------------------------------------------------

    def _current(self, sender: Incarnation, key: RequestKey, number: int | None) -> _Request | None:
        entry = self._entries.get(key)
        current = entry and (entry.owner, entry.message.number) == (sender, number)
        return entry if current else None

    def _decline(self, sender: Incarnation, offers: Offers) -> None:
        """Withdraw a lease that nobody waits for: it must not last for its time to live."""
        number = offers.request_number
        if not offers.dead and number is not None and 0 < number <= self._last_number:
            self._out.add(Send(sender, WithdrawLease(offers.key, number)))

    def _refused(self, now_ms: int, key: RequestKey, entry: _Request) -> None:
        self._leave(key, LeaseRequestEvent.NONE)
        entry.requester.lease_refused(now_ms, key, "none", "the owner has none for us")

    def _withdraw(self, key: RequestKey, event: LeaseRequestEvent, reason: str = "") -> None:
        entry = self._leave(key, event)
        self._out.add(Send(entry.owner, WithdrawLease(key, entry.message.number, reason)))

    def _leave(self, key: RequestKey, event: LeaseRequestEvent) -> _Request:
        LEASE_REQUEST_TABLE.leave(self._entries[key].state, event)
        return self._entries.pop(key)


def _cause(entry: _Request) -> str:
    if entry.state is LeaseRequestState.WAITING:
        return "the owner did not answer in time"
    return "nothing was offered or read for too long"
