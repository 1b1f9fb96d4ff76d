"""The reader's requests: repeated until answered, bounded, withdrawn when nobody waits."""

from collections.abc import Hashable, Sequence

import pytest

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
from disagg.transfer.actions import Send
from disagg.transfer.reader.requests import LeaseRequests
from disagg.transfer.reader.table import InboundTable
from tests.unit.transfer.two_workers import KEY, OTHER_KEY, OWNER, OWNER_AGAIN, READER, SEAL, sent

TIMEOUT, TTL, REPEAT = 100, 1000, 30
ASK = AskLease(KEY, 0, 8, 0, (b"x" * 32,), (0,))


class NoHolds:
    def hold(self, holder: Hashable, block_ids: Sequence[int]) -> None: ...

    def add_to_hold(self, holder: Hashable, block_ids: Sequence[int]) -> None: ...

    def drop(self, holder: Hashable) -> int:
        return 0


class Asking:
    """A reader's requests; it notes what was sent, and which answers its requester got."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.known: list[Offers] = []
        table = InboundTable(
            READER,
            NoHolds(),
            self,
            commit_repeat_ms=1,
            ask_repeat_ms=1,
            read_stuck_ms=1,
            blocks_per_read_max=1,
        )
        table.on_offers = lambda now_ms, sender, offers: self.known.append(offers)  # type: ignore[method-assign]
        self.requests = LeaseRequests(table, self, timeout_ms=TIMEOUT, ttl_ms=TTL, repeat_ms=REPEAT)

    def add(self, command: object) -> None:
        self.said.append(command)

    def lease_granted(self, now_ms: int, owner: Incarnation, offers: Offers) -> None:
        self.said.append("granted")

    def lease_refused(self, now_ms: int, key: RequestKey, cause: str, message: str) -> None:
        self.said.append((key, cause))

    def take(self) -> list[object]:
        """What was said since the last call."""
        said, self.said = self.said, []
        return said

    def ask(
        self, now_ms: int = 0, message: AskLease | TakeOver = ASK, owner: Incarnation = OWNER
    ) -> list[object]:
        self.requests.ask(now_ms, owner, message, self)
        return self.take()

    def tick(self, now_ms: int) -> list[object]:
        self.requests.tick(now_ms)
        return self.take()

    def hears(
        self,
        message: Offers | LeaseRefused | LeaseLoading,
        now_ms: int = 0,
        sender: Incarnation = OWNER,
    ) -> list[object]:
        if isinstance(message, LeaseLoading):
            self.requests.on_loading(now_ms, sender, message)
        elif isinstance(message, Offers):
            self.requests.on_offers(now_ms, sender, message)
        else:
            self.requests.on_refused(now_ms, sender, message)
        return self.take()


def lease(number: int, *, dead: bool = False) -> Offers:
    return Offers(KEY, 5, 0, (), None if dead else SEAL, dead=dead, request_number=number)


def test_numbers_count_up_over_all_generations() -> None:
    one = Asking()
    numbers = []
    for request in (ASK, TakeOver(OTHER_KEY, 0, KEY, (0,))):
        (message,) = sent(one.ask(0, request))
        assert isinstance(message, AskLease | TakeOver)
        numbers.append(message.number)
    assert numbers == [1, 2]
    with pytest.raises(InvariantViolation):
        one.ask()


def test_a_request_is_repeated_until_it_is_answered() -> None:
    one = Asking()
    request = one.ask()
    assert one.requests.next_deadline_ms() == REPEAT
    assert one.tick(REPEAT - 1) == []
    assert one.tick(REPEAT) == request
    assert one.hears(lease(1), 40) == ["granted"]
    assert one.tick(2 * REPEAT) == []
    more = [lease(1), lease(1, dead=True)]
    assert [one.hears(offers, 50) for offers in more] == [[], []]
    assert one.known == more, "the transfer's business"
    assert one.hears(LeaseRefused(KEY, 1)) == [], "being read, it ends by itself"
    one.requests.finished(KEY)
    assert one.requests.next_deadline_ms() is None


def gives_up(one: Asking, from_ms: int) -> int:
    """When the request is given up, if nothing comes."""
    now_ms = from_ms
    while (KEY, "timeout") not in one.tick(now_ms):
        now_ms += 1
    return now_ms


def test_it_is_waited_for_as_long_as_more_comes_out_of_a_tier() -> None:
    one = Asking()
    one.ask()
    assert one.hears(LeaseLoading(KEY, 1, 3), TIMEOUT - 1) == []
    assert one.hears(LeaseLoading(KEY, 1, 3), 2 * TIMEOUT - 2) == [], "no more than before"
    assert gives_up(one, TIMEOUT) == 2 * TIMEOUT - 1


@pytest.mark.parametrize(
    ("loading", "sender"),
    [
        (LeaseLoading(KEY, 1, 0), OWNER),
        (LeaseLoading(KEY, 2, 9), OWNER),
        (LeaseLoading(OTHER_KEY, 1, 9), OWNER),
        (LeaseLoading(KEY, 1, 9), OWNER_AGAIN),
    ],
)
def test_what_says_nothing_of_it_renews_nothing(loading: LeaseLoading, sender: Incarnation) -> None:
    one = Asking()
    one.ask()
    assert one.hears(loading, TIMEOUT - 1, sender) == []
    assert gives_up(one, 0) == TIMEOUT


def test_a_granted_lease_is_renewed_by_its_transfer_alone() -> None:
    one = Asking()
    one.ask()
    one.hears(lease(1), 0)
    one.hears(LeaseLoading(KEY, 1, 9), TTL - 1)
    assert gives_up(one, 0) == TTL


@pytest.mark.parametrize("refusal", [lease(1, dead=True), LeaseRefused(KEY, 1)])
def test_a_refusal_counts_once(refusal: Offers | LeaseRefused) -> None:
    one = Asking()
    one.ask()
    assert one.hears(refusal) == [(KEY, "none")]
    assert one.hears(refusal) == []


def test_a_lease_nobody_waits_for_is_withdrawn() -> None:
    one = Asking()
    one.ask()
    withdrawal = Send(OWNER, WithdrawLease(KEY, 1))
    one.requests.give_up(KEY)
    assert one.take() == [withdrawal]
    one.requests.give_up(KEY)
    assert one.take() == []
    assert one.hears(lease(1)) == [withdrawal]
    assert one.hears(lease(7)) == [], "never requested"


@pytest.mark.parametrize(
    ("sender", "number"), [(OWNER_AGAIN, 1), (OWNER, 2)], ids=["sender", "number"]
)
def test_only_the_answer_that_was_asked_for_counts(sender: Incarnation, number: int) -> None:
    one = Asking()
    one.ask()
    assert "granted" not in one.hears(lease(number), sender=sender)
    assert one.hears(LeaseRefused(KEY, number), sender=sender) == []
    assert one.hears(lease(1)) == ["granted"]


def test_no_answer_and_no_commit_in_time() -> None:
    one = Asking()
    one.ask()
    assert one.tick(TIMEOUT) == [Send(OWNER, WithdrawLease(KEY, 1)), (KEY, "timeout")]
    one.ask(TIMEOUT)
    assert one.hears(lease(2), TIMEOUT) == ["granted"]
    assert one.tick(TIMEOUT + TTL - 1) == []
    assert one.tick(TIMEOUT + TTL) == [Send(OWNER, WithdrawLease(KEY, 2)), (KEY, "timeout")]


def test_a_lost_owner_ends_its_requests() -> None:
    one = Asking()
    one.ask()
    one.ask(0, TakeOver(OTHER_KEY, 0, KEY, (0,)))
    one.hears(lease(1))
    one.requests.on_peer_lost(0, OWNER_AGAIN)
    assert one.take() == []
    one.requests.on_peer_lost(0, OWNER)
    assert one.take() == [(OTHER_KEY, "peer_lost")], "the one being read fails by itself"
    assert one.requests.next_deadline_ms() is None
