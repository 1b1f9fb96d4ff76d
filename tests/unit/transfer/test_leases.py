"""The owner's rules, one test each."""

from collections.abc import Hashable

import pytest

from disagg.errors import InvariantViolation
from disagg.messages.identity import Incarnation, RequestKey
from disagg.messages.peer import AskOffers, CommitAnswer, CommitSeen, Ended, OfferedRange, Offers
from disagg.transfer.actions import LeaseCommitted, LeaseEnded
from disagg.transfer.owner.lease import ranges_of
from disagg.transfer.owner.states import LeaseState
from tests.unit.transfer.two_workers import (
    COMMITTED_MAX,
    KEY,
    OTHER_KEY,
    READER,
    READER_AGAIN,
    TTL,
    Owner,
    commit,
    sent,
)


def ok(
    owner: Owner,
    lease: int,
    number: int = 1,
    counts: tuple[int, ...] = (2, 1),
    key: RequestKey = KEY,
    epoch: str = "R1",
    sender: Incarnation = READER,
) -> bool:
    message_of = commit(lease, number, counts, key, epoch)
    (message,) = sent(owner.table.on_commit(sender, message_of))
    assert isinstance(message, CommitAnswer)
    return message.ok


def test_a_range_is_offered_only_together_with_a_hold() -> None:
    owner = Owner()
    lease = owner.open()
    (message,) = sent(owner.table.offer(0, lease, [[(0, owner.blocks[0])], []]))
    owner.let_request_go()
    assert message == Offers(KEY, lease, 0, (OfferedRange(0, 0, owner.blocks[0], 1),))
    assert owner.pool.num_free == owner.free - 1
    free_block = owner.blocks[1]
    with pytest.raises(InvariantViolation):
        owner.table.offer(0, lease, [[(1, free_block)], []])
    assert owner.table.num_blocks_held == 1, "a refused offer must change nothing"


def test_adjacent_blocks_become_one_range() -> None:
    owner = Owner()
    lease = owner.open()
    b = owner.blocks
    (message,) = sent(owner.table.offer(0, lease, [[(0, b[0]), (1, b[1]), (2, b[3])], [(3, b[4])]]))
    assert isinstance(message, Offers)
    assert [(r.group, r.block_index, r.num_blocks) for r in message.ranges] == [
        (0, 0, 2),
        (0, 2, 1),
        (1, 3, 1),
    ]


def test_each_block_is_offered_once() -> None:
    owner = Owner()
    lease = owner.open()
    owner.table.offer(0, lease, [[(0, owner.blocks[0])], []])
    for again in ([[(0, owner.blocks[1])], []], [[(1, owner.blocks[1]), (1, owner.blocks[2])]]):
        with pytest.raises(InvariantViolation, match="offered twice"):
            owner.table.offer(0, lease, again)
    owner.table.offer(0, lease, [[], [(0, owner.blocks[1])]])  # the same index in another group


def test_nothing_is_offered_after_the_seal() -> None:
    owner = Owner()
    lease = owner.sealed()
    with pytest.raises(InvariantViolation):
        owner.table.offer(0, lease, [[(5, owner.blocks[5])], []])


def test_offers_are_numbered_and_asking_is_idempotent() -> None:
    owner = Owner()
    lease = owner.sealed()
    for _ in range(2):
        everything, tail, unbound = (
            sent(owner.table.on_ask(READER, AskOffers(KEY, ask_id, first)))[0]
            for ask_id, first in ((lease, 0), (lease, 2), (None, 0))
        )
        assert isinstance(everything, Offers)
        assert isinstance(tail, Offers)
        assert len(everything.ranges) == 3
        assert everything.seal == tail.seal
        assert everything.seal is not None
        assert everything.seal.num_ranges == (2, 1)
        assert (tail.first, tail.ranges) == (2, everything.ranges[2:])
        assert unbound == everything


def test_asking_for_an_unknown_lease_says_dead() -> None:
    owner = Owner()
    lease = owner.sealed()
    for sender, ask in (
        (READER, AskOffers(KEY, 99, 0)),
        (READER_AGAIN, AskOffers(KEY, lease, 0)),
        (READER, AskOffers(OTHER_KEY, lease, 0)),
    ):
        (message,) = sent(owner.table.on_ask(sender, ask))
        assert isinstance(message, Offers)
        assert message.dead
    assert owner.table.on_ask(READER, AskOffers(OTHER_KEY, None, 0)) == [], "it may come yet"


def test_sealed_and_equal_counts_is_ok_and_drops_the_hold() -> None:
    owner = Owner()
    lease = owner.sealed()
    owner.let_request_go()
    assert owner.pool.num_free == owner.free - 3
    message, committed = owner.table.on_commit(READER, commit(lease))
    assert sent([message]) == [CommitAnswer(KEY, lease, commit(lease).attempt, True)]
    assert committed == LeaseCommitted(KEY, lease)
    assert owner.pool.num_free == owner.free


def test_committed_says_ok_to_the_same_attempt_and_no_to_others() -> None:
    owner = Owner()
    lease = owner.sealed()
    assert ok(owner, lease)
    assert ok(owner, lease)
    assert not ok(owner, lease, 2)


@pytest.mark.parametrize("counts", [(), (0, 0), (2,), (2, 2), (1, 2), (2, 1, 0)])
def test_other_counts_get_no_and_change_nothing(counts: tuple[int, ...]) -> None:
    owner = Owner()
    lease = owner.sealed()
    assert not ok(owner, lease, counts=counts)
    assert ok(owner, lease)


def test_an_open_lease_and_an_unknown_one_say_no() -> None:
    owner = Owner()
    lease = owner.open()
    assert not ok(owner, lease, counts=())
    assert not ok(owner, lease + 1)


def test_a_lease_belongs_to_one_reader_incarnation() -> None:
    owner = Owner()
    lease = owner.sealed()
    assert not ok(owner, lease, sender=READER_AGAIN, epoch="R2")
    assert not ok(owner, lease, sender=READER_AGAIN)
    assert not ok(owner, lease, epoch="R2")
    assert not ok(owner, lease, key=OTHER_KEY)
    assert owner.table.on_ended(READER_AGAIN, Ended(KEY, "x")) == []
    assert ok(owner, lease)
    owner.table.on_seen(READER_AGAIN, CommitSeen(KEY, lease, commit(lease).attempt))
    assert ok(owner, lease), "another incarnation's CommitSeen must not forget it"


@pytest.mark.parametrize("way", ["end", "end_key", "expire", "on_ended", "on_peer_lost"])
def test_dead_first_reused_after(way: str) -> None:
    owner = Owner()
    lease = owner.sealed()
    owner.let_request_go()
    said_when_dropped = []
    drop = owner.pool.drop

    class Watch:
        def drop(self, holder: Hashable) -> int:
            said_when_dropped.append(ok(owner, lease))
            return drop(holder)

    owner.table._table.holds = Watch()
    actions = {
        "end": lambda: owner.table.end(lease, "pressure"),
        "end_key": lambda: owner.table.end_key(KEY, "preempted"),
        "expire": lambda: owner.table.expire(TTL),
        "on_ended": lambda: owner.table.on_ended(READER, Ended(KEY, "cancelled")),
        "on_peer_lost": lambda: owner.table.on_peer_lost(0, READER),
    }[way]()
    assert said_when_dropped == [False]
    assert isinstance(actions[0], LeaseEnded)
    told = [Offers(KEY, lease, 0, dead=True)] if way != "on_peer_lost" else []
    assert sent(actions) == told
    assert owner.pool.num_free == owner.free
    assert owner.table.end(lease, "again") == []


def test_time_to_live_starts_anew_with_what_the_owner_does() -> None:
    owner = Owner()
    first = owner.open()
    owner.table.open(1, OTHER_KEY, READER, owner.news)
    owner.table.offer(10, first, [[(0, owner.blocks[0])], []])
    assert owner.table.next_expiry_ms() == TTL + 1
    assert owner.table.expire(TTL) == []
    (ended, _) = owner.table.expire(TTL + 1)
    assert isinstance(ended, LeaseEnded)
    assert ended.key == OTHER_KEY
    assert owner.table.next_expiry_ms() == TTL + 10
    owner.table.expire(TTL + 10)
    assert owner.table.next_expiry_ms() is None


def test_offering_on_a_dead_lease_holds_nothing() -> None:
    owner = Owner()
    lease = owner.open()
    owner.table.end(lease, "x")
    assert owner.table.offer(0, lease, [[(0, owner.blocks[0])], []]) == []
    assert owner.table.seal(0, lease, [[], []], 0) == []
    owner.let_request_go()
    assert owner.pool.num_free == owner.free


def test_one_generation_has_one_live_lease_and_a_retry_a_new_id() -> None:
    owner = Owner()
    lease = owner.open()
    with pytest.raises(InvariantViolation):
        owner.open()
    owner.table.end(lease, "preempted")
    assert owner.open() > lease


def test_committed_leases_are_forgotten_when_seen_lost_or_crowded_out() -> None:
    for forget in ("seen", "lost", "crowded"):
        owner = Owner()
        lease = owner.sealed()
        assert ok(owner, lease)
        if forget == "seen":
            owner.table.on_seen(READER, CommitSeen(KEY, lease, commit(lease).attempt))
        elif forget == "lost":
            owner.table.on_peer_lost(0, READER)
        for _ in range(COMMITTED_MAX if forget == "crowded" else 0):
            newer = owner.sealed()
            assert ok(owner, lease), "remembered until then"
            assert ok(owner, newer)
        assert not ok(owner, lease), forget
        assert len(owner.table.statuses()) <= COMMITTED_MAX


def test_after_a_commit_asking_is_not_answered_dead() -> None:
    owner = Owner()
    lease = owner.sealed()
    ok(owner, lease)
    assert owner.table.on_ask(READER, AskOffers(KEY, lease, 0)) == []
    assert [one.state for one in owner.table.statuses()] == [LeaseState.COMMITTED]
    assert owner.table.end(lease, "late") == [], "a committed lease does not die"


@pytest.mark.parametrize(
    ("pairs", "ranges"),
    [
        ([(0, 5), (1, 6), (2, 7)], [(0, 5, 3)]),
        ([(0, 5), (2, 6)], [(0, 5, 1), (2, 6, 1)]),  # a gap of block indexes
        ([(0, 5), (1, 7)], [(0, 5, 1), (1, 7, 1)]),  # a gap in the pool
        ([(3, 5), (4, 6), (6, 7), (7, 8)], [(3, 5, 2), (6, 7, 2)]),
        ([], []),
    ],
)
def test_a_range_is_without_gaps_in_the_request_and_in_the_pool(
    pairs: list[tuple[int, int]], ranges: list[tuple[int, int, int]]
) -> None:
    found = [(r.block_index, r.block_id, r.num_blocks) for r in ranges_of(2, pairs)]
    assert found == ranges
    assert {r.group for r in ranges_of(2, pairs)} <= {2}
