"""The reader's rules, one test each."""

from collections.abc import Sequence

import pytest

from disagg.errors import InvariantViolation
from disagg.messages.peer import AskOffers, Commit, CommitSeen, OfferedRange, Offers, Seal
from disagg.transfer.actions import (
    InboundCommitted,
    InboundDrained,
    InboundFailed,
    InboundFailure,
    InboundPartial,
    PostRead,
    Send,
)
from disagg.transfer.reader.states import InboundState
from tests.unit.transfer.two_workers import (
    ASK_REPEAT,
    COMMIT_REPEAT,
    KEY,
    OTHER_KEY,
    OWNER,
    OWNER_AGAIN,
    RANGES,
    SEAL,
    STUCK,
    Reader,
    answer,
    offers,
    sent,
)


def failed(actions: Sequence[object]) -> InboundFailed:
    (failure,) = [action for action in actions if isinstance(action, InboundFailed)]
    return failure


def test_destinations_are_held_from_the_begin() -> None:
    reader = Reader()
    reader.begin()
    assert reader.pool.num_free == reader.free - 4
    with pytest.raises(InvariantViolation):
        reader.begin()


def test_reads_are_posted_in_pieces_for_what_was_offered() -> None:
    reader = Reader()
    dst = reader.begin()
    posted = reader.table.on_offers(0, OWNER, offers())
    assert posted == [
        PostRead(1, KEY, OWNER, (11, 12), (dst[0], dst[1])),
        PostRead(2, KEY, OWNER, (21, 31), (dst[2], dst[3])),
    ]


def test_repeated_and_overlapping_offers_post_nothing_twice() -> None:
    reader = Reader()
    reader.begin()
    reader.table.on_offers(0, OWNER, offers(0, RANGES[:2], None))
    assert reader.table.on_offers(0, OWNER, offers(0, RANGES[:2], None)) == []
    assert len(reader.table.on_offers(0, OWNER, offers(1, RANGES[1:]))) == 1
    assert reader.table.on_offers(0, OWNER, offers()) == []


def test_a_gap_is_asked_for_once_and_then_at_the_interval() -> None:
    reader = Reader()
    reader.begin()
    ask = AskOffers(KEY, 1, 0)
    assert sent(reader.table.on_offers(0, OWNER, offers(1, RANGES[1:]))) == [ask]
    assert reader.table.on_offers(0, OWNER, offers(2, RANGES[2:])) == []
    assert reader.table.next_deadline_ms() == ASK_REPEAT
    assert sent(reader.table.tick(ASK_REPEAT)) == [ask]
    assert len(reader.table.on_offers(0, OWNER, offers())) == 2


def test_a_seal_that_overtakes_offers_commits_nothing() -> None:
    reader = Reader()
    reader.begin()
    (ask,) = sent(reader.table.on_offers(0, OWNER, offers(0, ())))
    assert ask == AskOffers(KEY, 1, 0)
    assert reader.table.statuses()[0].state is InboundState.READING


def test_the_reader_asks_before_it_knows_the_lease() -> None:
    reader = Reader()
    reader.begin()
    ask = AskOffers(KEY, None, 0)
    assert reader.table.tick(ASK_REPEAT - 1) == []
    assert sent(reader.table.tick(ASK_REPEAT)) == [ask]
    assert reader.table.tick(ASK_REPEAT) == []


@pytest.mark.parametrize(
    "bad",
    [
        offers(0, (OfferedRange(0, 2, 11, 1),), None),  # no destination
        offers(0, (OfferedRange(0, 1, 11, 2),), None),  # runs beyond one
        offers(0, (OfferedRange(2, 0, 11, 1),), None),  # no such group
        offers(0, (OfferedRange(-1, 0, 11, 1),), None),
        offers(0, (OfferedRange(0, 0, 11, 0),), None),  # no blocks
        offers(0, (RANGES[0], RANGES[0]), None),  # twice
        offers(0, (RANGES[0], OfferedRange(0, 1, 90, 1)), None),  # twice, elsewhere
        offers(-1, RANGES[:1], None),
        offers(0, RANGES, Seal(8, (2, 1))),  # counts of other groups
        offers(0, RANGES, Seal(8, (1, 1))),  # fewer than were offered
        offers(0, RANGES[:1], Seal(8, (1, 0))),  # destinations missing
        offers(0, RANGES, Seal(8, (3,))),
    ],
)
def test_what_the_protocol_forbids_fails_the_transfer(bad: Offers) -> None:
    reader = Reader()
    reader.begin()
    actions = reader.table.on_offers(0, OWNER, bad)
    assert failed(actions).reason is InboundFailure.READ_FAILED
    for post in actions:
        if isinstance(post, PostRead):
            assert reader.pool.num_free == reader.free - 4, "held while READs are in progress"
            reader.table.on_read_done(0, post.read_id)
    assert reader.pool.num_free == reader.free


def test_contradicting_offers_fail_the_transfer_and_name_the_block() -> None:
    reader = Reader()
    reader.begin()
    reader.table.on_offers(0, OWNER, offers(0, RANGES[:1], None))
    other = OfferedRange(0, 0, 99, 2)
    assert failed(reader.table.on_offers(0, OWNER, offers(0, (other,), None)))
    reader = Reader()
    reader.begin()
    beyond = OfferedRange(1, 7, 99, 1)
    failure = failed(reader.table.on_offers(0, OWNER, offers(0, (beyond,), None)))
    assert failure.block == (1, 7)


def test_commit_only_after_every_read_is_done_and_the_seal_is_met() -> None:
    reader = Reader()
    reader.begin()
    reader.table.on_offers(0, OWNER, offers(0, RANGES[:2], None))
    assert reader.table.on_read_done(0, 1) == []
    assert reader.table.on_read_done(0, 2) == []
    reader.table.on_offers(0, OWNER, offers(2, RANGES[2:]))
    (message,) = sent(reader.table.on_read_done(7, 3))
    assert message.num_ranges == (1, 2)  # type: ignore[union-attr]
    assert sent(reader.table.tick(7 + COMMIT_REPEAT)) == [message], "the same attempt again"


def test_time_in_which_nothing_is_read_is_no_reading_time() -> None:
    reader = Reader()
    reader.begin()
    reader.table.on_offers(10, OWNER, offers(0, RANGES[:2], None))
    reader.table.on_read_done(13, 1)
    reader.table.on_read_done(15, 2)
    reader.table.on_offers(900, OWNER, offers(2, RANGES[2:]))  # computed meanwhile
    reader.table.on_read_done(907, 3)
    committed = reader.table.on_commit_answer(910, OWNER, answer(True))[0]
    assert isinstance(committed, InboundCommitted)
    stats = committed.stats
    assert (stats.num_reads, stats.read_ms) == (3, 897)
    assert (stats.num_bursts, stats.reading_ms) == (2, 12)


def test_only_an_ok_for_the_current_attempt_makes_it_valid() -> None:
    reader = Reader()
    reader.committing()
    for sender, message in (
        (OWNER, answer(True, number=2)),
        (OWNER, answer(True, epoch="R0")),
        (OWNER, answer(True, lease=2)),
        (OWNER_AGAIN, answer(True)),
        (OWNER_AGAIN, answer(False)),
        (OWNER, answer(False, number=2)),
    ):
        assert reader.table.on_commit_answer(0, sender, message) == []
    committed, seen = reader.table.on_commit_answer(5, OWNER, answer(True))
    assert isinstance(committed, InboundCommitted)
    assert committed.seal == SEAL
    assert (committed.stats.num_reads, committed.stats.num_blocks) == (2, (2, 2))
    assert committed.stats.exposed_ms == 5
    assert sent([seen]) == [CommitSeen(KEY, 1, answer(True).attempt)]
    assert reader.table.on_commit_answer(0, OWNER, answer(True)) == []


def test_the_hold_ends_only_after_the_caller_made_the_blocks_valid() -> None:
    reader = Reader()
    reader.committing()
    with pytest.raises(InvariantViolation):
        reader.table.finish(KEY)
    reader.table.on_commit_answer(0, OWNER, answer(True))
    assert reader.pool.num_free == reader.free - 4
    assert reader.table.on_offers(0, OWNER, Offers(KEY, 1, 0, dead=True)) == []
    assert reader.table.on_peer_lost(0, OWNER) == []
    reader.table.finish(KEY)
    assert reader.pool.num_free == reader.free
    assert reader.table.next_deadline_ms() is None


def test_no_fails_the_transfer() -> None:
    reader = Reader()
    reader.committing()
    actions = reader.table.on_commit_answer(0, OWNER, answer(False))
    assert failed(actions).reason is InboundFailure.COMMIT_REFUSED
    assert actions[-1] == InboundDrained(KEY, 4)
    assert reader.table.on_commit_answer(0, OWNER, answer(True)) == [], "too late"


@pytest.mark.parametrize("way", ["abort", "dead", "lost", "stuck", "superseded"])
def test_destinations_are_held_until_every_read_is_terminal_whatever_happens(way: str) -> None:
    reader = Reader()
    reader.begin()
    reader.table.on_offers(0, OWNER, offers(0, RANGES, None))
    table = reader.table
    actions = {
        "abort": lambda: table.abort(KEY),
        "dead": lambda: table.on_offers(0, OWNER, Offers(KEY, 1, 9, dead=True)),
        "lost": lambda: table.on_peer_lost(0, OWNER),
        "stuck": lambda: table.tick(STUCK),
        "superseded": lambda: table.on_offers(0, OWNER, offers(lease_id=2)),
    }[way]()
    assert [type(a) for a in actions] == ([InboundFailed] if way != "abort" else [])
    assert table.statuses()[0].state is InboundState.DRAINING
    assert table.on_offers(0, OWNER, offers()) == [], "a draining transfer only drains"
    assert table.on_read_done(0, 2) == []
    assert reader.pool.num_free == reader.free - 4
    assert table.on_read_done(0, 1) == [InboundDrained(KEY, 4)]
    assert reader.pool.num_free == reader.free
    assert table.on_read_done(0, 1) == [], "a repeated report changes nothing"


def test_a_new_transfer_of_the_key_may_begin_while_the_old_one_drains() -> None:
    reader = Reader()
    reader.begin()
    reader.table.on_offers(0, OWNER, offers())
    reader.table.abort(KEY)
    reader.begin()
    reader.table.on_read_done(0, 1)
    assert reader.table.on_read_done(0, 2) == [InboundDrained(KEY, 4)]
    assert reader.pool.num_free == reader.free - 4
    assert reader.table.on_offers(0, OWNER, offers()) == [], "the old lease is not the new one's"
    assert len(reader.table.on_offers(0, OWNER, offers(lease_id=2))) == 2


def test_the_wrong_sender_or_an_unknown_generation_changes_nothing() -> None:
    reader = Reader()
    reader.begin()
    before = reader.table.statuses()
    table = reader.table
    assert table.on_offers(0, OWNER_AGAIN, offers()) == []
    assert table.on_offers(0, OWNER, offers(key=OTHER_KEY)) == []
    assert table.on_peer_lost(0, OWNER_AGAIN) == []
    assert table.abort(OTHER_KEY) == []
    assert table.statuses() == before


def test_stuck_reads_are_quarantined_and_pause_their_owner() -> None:
    reader = Reader()
    reader.begin()
    posted_ms = 7
    now_ms = posted_ms + STUCK
    reader.table.on_offers(posted_ms, OWNER, offers())
    assert reader.table.next_deadline_ms() == now_ms
    failure = failed(reader.table.tick(now_ms))
    assert (failure.reason, failure.block) == (InboundFailure.READ_STUCK, (0, 0))
    assert failure.message.endswith(f"block 0:0 (group:block) is in progress for {STUCK} ms")
    assert reader.table.num_blocks_quarantined == 4
    assert reader.table.peers_paused == {OWNER}
    reader.begin(OTHER_KEY)
    assert reader.table.on_offers(now_ms, OWNER, offers(key=OTHER_KEY, lease_id=2)) == []
    assert reader.table.on_read_done(now_ms, 1) == [], "one of the two is still stuck"
    drained, *posted = reader.table.on_read_done(now_ms, 2, "disconnect")
    assert drained == InboundDrained(KEY, 4)
    assert [type(post) for post in posted] == [PostRead, PostRead], "what waited is posted now"
    assert (reader.table.num_blocks_quarantined, reader.table.peers_paused) == (0, frozenset())


def test_paused_pages_are_not_committed() -> None:
    reader = Reader()
    reader.begin(OTHER_KEY)
    reader.table.on_offers(0, OWNER, offers(key=OTHER_KEY))
    reader.table.tick(STUCK)
    reader.begin()
    actions = reader.table.on_offers(STUCK, OWNER, offers(lease_id=2))
    assert not any(isinstance(action, Send) for action in actions)


def test_when_no_read_succeeds_the_transfer_fails_and_names_a_block() -> None:
    reader = Reader()
    reader.begin()
    reader.table.on_offers(0, OWNER, offers())
    assert reader.table.on_read_done(0, 2, "remote disconnect") == []
    failure = failed(reader.table.on_read_done(0, 1, "timed out"))
    assert failure.block == (1, 0)
    lost = "blocks 0:0, 0:1, 1:0, 1:1 (group:block) did not arrive"
    assert failure.message == f"{lost}: remote disconnect", "the first one's"
    assert reader.pool.num_free == reader.free


def partly_read(reader: Reader) -> Commit:
    """READ 2 (both blocks of group 1) fails, READ 1 does not: the Commit that follows."""
    reader.begin()
    reader.table.on_offers(0, OWNER, offers())
    assert reader.table.on_read_done(0, 2, "remote disconnect") == []
    (message,) = sent(reader.table.on_read_done(0, 1))
    assert isinstance(message, Commit)
    return message


def test_after_a_failed_read_the_commit_says_which_blocks_are_right() -> None:
    reader = Reader()
    assert partly_read(reader).num_ranges == (1, 2), "the owner held everything"
    partial, seen = reader.table.on_commit_answer(0, OWNER, answer(True))
    assert isinstance(partial, InboundPartial)
    assert partial.failed == ((1, 0), (1, 1))
    lost = "blocks 1:0, 1:1 (group:block) did not arrive"
    assert partial.message == f"{lost}: remote disconnect"
    assert isinstance(seen, Send)
    assert isinstance(seen.message, CommitSeen)
    assert reader.table.statuses()[0].state is InboundState.PARTIAL
    assert reader.table.on_peer_lost(0, OWNER) == [], "the owner is needed no more"
    assert reader.pool.num_free == reader.free - 4
    reader.table.finish(KEY)
    assert reader.pool.num_free == reader.free


def test_after_a_failed_read_a_no_makes_nothing_right() -> None:
    reader = Reader()
    partly_read(reader)
    failure = failed(reader.table.on_commit_answer(0, OWNER, answer(False)))
    assert failure.reason is InboundFailure.COMMIT_REFUSED


def test_a_failed_read_before_the_seal_waits_for_it() -> None:
    reader = Reader()
    reader.begin()
    reader.table.on_offers(0, OWNER, offers(0, RANGES, None))
    assert reader.table.on_read_done(0, 2, "remote disconnect") == []
    assert reader.table.on_read_done(0, 1) == []
    assert isinstance(sent(reader.table.on_offers(0, OWNER, offers(3, ())))[0], Commit)


def test_a_partial_transfer_may_be_aborted() -> None:
    reader = Reader()
    partly_read(reader)
    reader.table.on_commit_answer(0, OWNER, answer(True))
    assert reader.table.abort(KEY) == [InboundDrained(KEY, 4)]
    assert reader.pool.num_free == reader.free


def test_nothing_to_pull_still_needs_the_commit() -> None:
    reader = Reader()
    reader.table.begin(0, KEY, OWNER, [[], []], reader.news)
    seal = Seal(8, (0, 0), 42)
    (message,) = sent(reader.table.on_offers(0, OWNER, offers(0, (), seal)))
    assert message.num_ranges == (0, 0)  # type: ignore[union-attr]


def test_surplus_is_offered_and_not_read() -> None:
    reader = Reader()
    blocks = reader.pool.allocate(2)
    pairs = [(1, blocks[0]), (3, blocks[1])]
    reader.table.begin(0, KEY, OWNER, [pairs, []], reader.news, None, [{0, 2}, ()])
    everything = offers(0, (OfferedRange(0, 0, 11, 4),), Seal(16, (1, 0)))
    assert reader.table.on_offers(0, OWNER, everything) == [
        PostRead(1, KEY, OWNER, (12, 14), (blocks[0], blocks[1]))
    ]
    (commit,) = sent(reader.table.on_read_done(0, 1))
    assert isinstance(commit, Commit)


def test_surplus_is_offered_only_once() -> None:
    reader = Reader()
    reader.table.begin(0, KEY, OWNER, [[], []], reader.news, None, [{0}, ()])
    twice = offers(0, (OfferedRange(0, 0, 11, 1), OfferedRange(0, 0, 12, 1)), None)
    assert failed(reader.table.on_offers(0, OWNER, twice)).block == (0, 0)
