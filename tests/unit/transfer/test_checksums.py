"""Offers wait for the checksums of their blocks; what comes with other ones has not arrived."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from disagg.messages.identity import LeaseRequest
from disagg.messages.peer import (
    AskOffers,
    Commit,
    LeaseLoading,
    OfferedRange,
    Offers,
    ReadProgress,
    TakeOver,
)
from disagg.transfer.actions import (
    ComputeChecksums,
    InboundCommitted,
    InboundFailed,
    InboundFailure,
    InboundPartial,
    PostRead,
)
from disagg.transfer.owner.requests import LeaseAnswers
from tests.unit.transfer.two_workers import (
    KEY,
    OTHER_KEY,
    OWNER,
    RANGES,
    READER,
    READER_AGAIN,
    SEAL,
    TTL,
    Owner,
    Reader,
    answer,
    offers,
    sent,
)


def sum_of(block: int) -> int:
    """Of what is in a block, in these tests."""
    return 1_000 + block


def wanted(actions: Sequence[object]) -> ComputeChecksums:
    """The only request for checksums among actions."""
    (found,) = [one for one in actions if isinstance(one, ComputeChecksums)]
    return found


def no_wish(actions: Sequence[object]) -> bool:
    return not any(isinstance(one, ComputeChecksums) for one in actions)


# -- the owner --------------------------------------------------------------------------------


def known(owner: Owner, request: ComputeChecksums, now_ms: int = 0) -> list[object]:
    """The checksums of a request are there; what that causes."""
    owner.checksums.on_computed(now_ms, request.request_id, [sum_of(b) for b in request.blocks])
    return [*owner.news.take()]


def open_sealed(owner: Owner, answers: LeaseAnswers, request: LeaseRequest) -> list[object]:
    blocks = owner.blocks
    answers.open_sealed(
        0, request, [[(0, blocks[0]), (1, blocks[1]), (2, blocks[4])]], 3, owner.news
    )
    return [*owner.news.take()]


def test_an_offer_waits_for_its_checksums() -> None:
    owner = Owner(with_checksums=True)
    lease = owner.open()
    first, second, third = owner.blocks[0], owner.blocks[2], owner.blocks[4]
    said = owner.table.offer(0, lease, [[(0, first)], []])
    assert not sent(said)
    request = wanted(said)
    assert request.blocks == (first,)
    # More is offered, and the list is closed, meanwhile: one piece at a time is computed.
    assert owner.table.seal(0, lease, [[(1, second)], [(1, third)]], 8, 42) == []
    assert sent(owner.table.on_ask(READER, AskOffers(KEY, lease, 0)))[0] == Offers(KEY, lease, 0)
    said = known(owner, request)
    (now_offered,) = sent(said)
    assert now_offered == Offers(KEY, lease, 0, (OfferedRange(0, 0, first, 1, (sum_of(first),)),))
    (rest,) = sent(known(owner, wanted(said)))
    assert isinstance(rest, Offers)
    assert (rest.first, [r.checksums for r in rest.ranges]) == (
        1,
        [(sum_of(second),), (sum_of(third),)],
    )
    assert rest.seal is not None, "with the last of them"
    (all_of_it,) = sent(owner.table.on_ask(READER, AskOffers(KEY, lease, 0)))
    assert isinstance(all_of_it, Offers)
    assert (len(all_of_it.ranges), all_of_it.seal) == (3, rest.seal)


def test_a_range_longer_than_a_piece_is_offered_when_all_of_it_is_known() -> None:
    owner = Owner(with_checksums=True)
    lease, blocks = owner.open(), owner.blocks
    said = owner.table.offer(0, lease, [list(enumerate(blocks[:5])), []])
    pieces = []
    for _ in range(3):
        assert not sent(said)
        pieces.append(wanted(said).blocks)
        said = known(owner, wanted(said))
    assert pieces == [tuple(blocks[:2]), tuple(blocks[2:4]), tuple(blocks[4:5])]
    (offered,) = sent(said)
    assert isinstance(offered, Offers)
    assert [r.checksums for r in offered.ranges] == [tuple(map(sum_of, blocks[:5]))]
    assert no_wish(said)


def test_an_empty_seal_waits_for_what_was_offered_before() -> None:
    owner = Owner(with_checksums=True)
    lease = owner.open()
    request = wanted(owner.table.offer(0, lease, [[(0, owner.blocks[0])], []]))
    assert owner.table.seal(0, lease, [[], []], 8, 42) == []
    (offered,) = sent(known(owner, request))
    assert isinstance(offered, Offers)
    assert (len(offered.ranges), offered.seal is not None) == (1, True)


def test_a_prefill_that_goes_on_is_shown_beside_offers_that_wait() -> None:
    owner = Owner(with_checksums=True)
    lease = owner.open()
    owner.table.offer(0, lease, [[(0, owner.blocks[0])], []])
    (shown,) = sent(owner.table.renew(0, lease, 5))
    assert shown == Offers(KEY, lease, 0, num_computed_tokens=5), "no gap at the reader"


def test_checksums_renew_the_lease_and_those_of_a_dead_one_change_nothing() -> None:
    owner = Owner(with_checksums=True)
    lease = owner.open()
    request = wanted(
        owner.table.offer(0, lease, [[(0, owner.blocks[0]), (1, owner.blocks[4])], []])
    )
    assert len(request.blocks) == 2
    known(owner, request, TTL - 1)
    assert not owner.table.expire(TTL)
    request = wanted(owner.table.offer(TTL, lease, [[(2, owner.blocks[6])], []]))
    owner.table.end(lease, "test")
    owner.let_request_go()
    assert owner.pool.num_free == owner.free, "nothing is held for them"
    assert known(owner, request) == []


def test_a_requested_lease_is_answered_as_a_whole() -> None:
    owner = Owner(with_checksums=True)
    answers, request = LeaseAnswers(owner.leases, 2), LeaseRequest(READER, KEY, 7)
    said = open_sealed(owner, answers, request)
    assert not sent(said)
    assert answers.repeat(request)
    assert sent(owner.news.take()) == [LeaseLoading(KEY, 7, 3)]
    # Who guesses is not told a part: the reader would take it for the whole answer.
    assert owner.table.on_ask(READER, AskOffers(KEY, 1, 0)) == []
    said = known(owner, wanted(said))
    assert not sent(said)
    assert answers.repeat(request)
    assert sent(owner.news.take()) == [LeaseLoading(KEY, 7, 5)], "it goes on"
    (whole,) = sent(known(owner, wanted(said)))
    assert isinstance(whole, Offers)
    assert (whole.first, len(whole.ranges), whole.request_number) == (0, 2, 7)
    assert whole.seal is not None
    assert answers.repeat(request)
    assert sent(owner.news.take()) == [whole]


def test_who_takes_a_lease_over_has_its_own_checksums_computed() -> None:
    """Those of the old one may not be known yet, and its reader may be gone."""
    owner = Owner(with_checksums=True)
    owner.leases._take_over_ms = 100
    answers = LeaseAnswers(owner.leases, 2)
    lease = owner.open(first_lacked=(0, 0))
    old = wanted(owner.table.seal(0, lease, [[(0, owner.blocks[0])], []], 8, 42))
    owner.table.on_peer_lost(0, READER)
    assert known(owner, old) == [], "nobody reads it"
    key = KEY._replace(generation=1)
    answers.take_over(0, READER_AGAIN, TakeOver(key, 3, KEY, (0, 0)), owner.news)
    said = owner.news.take()
    (offered,) = [one for one in sent(known(owner, wanted(said))) if isinstance(one, Offers)]
    assert offered.ranges == (OfferedRange(0, 0, owner.blocks[0], 1, (sum_of(owner.blocks[0]),)),)
    assert (offered.seal is not None, offered.request_number) == (True, 3)


# -- the reader -------------------------------------------------------------------------------

CHECKED = tuple(
    replace(r, checksums=tuple(sum_of(r.block_id + i) for i in range(r.num_blocks))) for r in RANGES
)


class Pull:
    """A transfer whose READs bring what the owner has, but for some blocks of the owner's."""

    def __init__(self, *differing: int) -> None:
        self.reader = Reader(with_checksums=True)
        self.reader.begin()
        self.differing = differing
        self.source: dict[int, int] = {}
        said = self.reader.table.on_offers(0, OWNER, offers(0, CHECKED))
        self.reads = [one for one in said if isinstance(one, PostRead)]
        for read in self.reads:
            self.source.update(zip(read.dst_blocks, read.src_blocks, strict=True))

    def done(self, read: PostRead, error: str = "") -> list[object]:
        said: list[object] = self.reader.table.on_read_done(0, read.read_id, error)
        return said

    def known(self, request: ComputeChecksums) -> list[object]:
        found = [self.source[block] for block in request.blocks]
        sums = [sum_of(one) + (one in self.differing) for one in found]
        self.reader.checksums.on_computed(0, request.request_id, sums)
        return [*self.reader.news.take()]

    def confirmed(self) -> list[object]:
        said: list[object] = self.reader.table.on_commit_answer(5, OWNER, answer(True))
        return said


def test_a_commit_is_sent_when_every_checksum_is_known() -> None:
    pull = Pull()
    requests = [wanted(pull.done(read)) for read in pull.reads]
    assert [set(one.blocks) for one in requests] == [set(read.dst_blocks) for read in pull.reads]
    said = pull.known(requests[1])
    assert not [one for one in sent(said) if not isinstance(one, ReadProgress)]
    (commit,) = sent(pull.known(requests[0]))
    assert isinstance(commit, Commit)
    assert any(isinstance(one, InboundCommitted) for one in pull.confirmed())
    assert pull.reader.table.num_mismatches == 0


def test_a_block_that_differs_has_not_arrived() -> None:
    pull = Pull(RANGES[0].block_id + 1)
    for read in pull.reads:
        pull.known(wanted(pull.done(read)))
    (partial,) = [one for one in pull.confirmed() if isinstance(one, InboundPartial)]
    assert partial.failed == ((0, 1),)
    assert "checksums differ" in partial.message
    assert pull.reader.table.num_mismatches == 1


def test_a_transfer_of_which_everything_differs_has_failed() -> None:
    pull = Pull(*(r.block_id + i for r in RANGES for i in range(r.num_blocks)))
    said = [said for read in pull.reads for said in pull.known(wanted(pull.done(read)))]
    (failed,) = [one for one in said if isinstance(one, InboundFailed)]
    assert failed.reason is InboundFailure.READ_FAILED
    assert "checksums differ" in failed.message
    assert pull.reader.table.num_mismatches == 4
    pool = pull.reader.pool
    assert pool.num_free == pull.reader.free, "no READ is in progress"


def test_nothing_is_computed_of_a_read_that_failed() -> None:
    pull = Pull()
    assert no_wish(pull.done(pull.reads[0], "lost"))


def test_a_transfer_that_is_given_up_does_not_wait_for_checksums() -> None:
    pull = Pull(RANGES[0].block_id)
    first, second = (wanted(pull.done(read)) for read in pull.reads)
    pull.reader.table.abort(KEY)
    assert pull.reader.pool.num_free == pull.reader.free
    assert pull.known(first) == pull.known(second) == []
    assert pull.reader.table.num_mismatches == 0


@pytest.mark.parametrize("checksums", [(), (1,), (1, 2, 3)])
def test_an_offer_without_the_checksum_of_each_block_breaks_the_protocol(
    checksums: tuple[int, ...],
) -> None:
    """As of an owner that computes none: nothing of it is read unchecked."""
    reader = Reader(with_checksums=True)
    reader.begin()
    bad = replace(CHECKED[0], checksums=checksums)
    said = reader.table.on_offers(0, OWNER, offers(0, (bad, *CHECKED[1:])))
    (failed,) = [one for one in said if isinstance(one, InboundFailed)]
    assert (failed.reason, failed.block) == (InboundFailure.READ_FAILED, (0, 0))
    assert not [one for one in said if isinstance(one, PostRead)]


def test_without_the_setting_nothing_is_computed() -> None:
    """Control, at both."""
    owner, reader = Owner(), Reader()
    lease = owner.open(OTHER_KEY)
    assert no_wish(owner.table.offer(0, lease, [[(0, owner.blocks[0])], []]))
    reader.begin()
    reads = [one for one in reader.table.on_offers(0, OWNER, offers()) if isinstance(one, PostRead)]
    said = [said for read in reads for said in reader.table.on_read_done(0, read.read_id)]
    assert no_wish(said)
    assert any(isinstance(one, Commit) for one in sent(said))
    assert SEAL.num_ranges == (1, 2)
