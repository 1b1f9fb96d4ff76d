"""Leases that readers request: born sealed, answered once per number, taken over in one step."""

from collections.abc import Sequence

from disagg.messages.identity import Incarnation, LeaseRequest, RequestKey
from disagg.messages.peer import (
    AskOffers,
    CommitAnswer,
    Ended,
    LeaseRefused,
    Offers,
    TakeOver,
    WithdrawLease,
)
from disagg.transfer.actions import LeaseCommitted, LeaseEnded, Send
from disagg.transfer.owner.requests import LeaseAnswers
from disagg.transfer.owner.states import LeaseState
from disagg.transfer.owner.table import LeaseTable
from tests.unit.transfer.two_workers import (
    KEY,
    OWNER,
    READER,
    READER_AGAIN,
    TTL,
    Owner,
    Said,
    commit,
    sent,
)

NEXT = Incarnation("reader 2", "S1")
NEXT_KEY = RequestKey(KEY.request_id, KEY.generation + 1)
LATER_KEY = RequestKey(KEY.request_id, KEY.generation + 2)
GRACE = 200
REQUEST = LeaseRequest(READER, KEY, 1)
Answer = Offers | LeaseRefused


class Asked(Owner):
    """An owner whose table waits for another reader, and its answers."""

    def __init__(self, answers_max: int = 2) -> None:
        super().__init__()
        table = LeaseTable(
            OWNER, self.pool, self.news, ttl_ms=TTL, committed_max=2, take_over_ms=GRACE
        )
        self.table = Said(table, self.news)
        self.answers = Said(LeaseAnswers(table, answers_max), self.news)

    def pulled(self, request: LeaseRequest = REQUEST) -> Offers:
        """A prefix pull of two blocks of group 0 and one of group 1."""
        b = self.blocks
        blocks = [[(0, b[0]), (1, b[1])], [(1, b[4])]]
        return granted(self.answers.open_sealed(0, request, blocks, 8, self.news))

    def handed_over(self, first_lacked: tuple[int, ...] = (0, 1)) -> int:
        """A sealed lease whose reader lacked from these blocks on; the request is over."""
        lease = self.open(first_lacked=first_lacked)
        self.table.offer(0, lease, [[(0, self.blocks[0])], []])
        self.table.seal(0, lease, [[(1, self.blocks[1])], [(1, self.blocks[4])]], 8, 42, -0.5)
        self.let_request_go()
        return lease

    def takes(self, number: int = 1, lacked: tuple[int, ...] = (0, 1), **more: object) -> Answer:
        key, old = more.get("key", NEXT_KEY), more.get("old", KEY)
        assert isinstance(key, RequestKey)
        assert isinstance(old, RequestKey)
        take_over = TakeOver(key, number, old, lacked)
        return one(self.answers.take_over(0, NEXT, take_over, self.news))

    @property
    def num_held(self) -> int:
        return self.free - self.pool.num_free

    def states(self) -> list[LeaseState]:
        return [status.state for status in self.table.statuses()]


def one(said: Sequence[object]) -> Answer:
    """The answer to a request among what was said."""
    *_, answer = sent(said)
    assert isinstance(answer, Offers | LeaseRefused)
    return answer


def granted(answer: Answer | Sequence[object]) -> Offers:
    """The answer, which must be a lease."""
    found = one(answer) if not isinstance(answer, Offers | LeaseRefused) else answer
    assert isinstance(found, Offers)
    assert not found.dead
    return found


def refused(owner: Asked, request: LeaseRequest) -> bool:
    """Whether the repeated request is refused."""
    assert owner.answers.repeat(request)
    return isinstance(one(owner.news.take()), LeaseRefused)


def test_a_pull_is_born_sealed_with_everything_in_the_answer() -> None:
    owner = Asked()
    answer = owner.pulled()
    owner.let_request_go()
    assert (answer.request_number, answer.first, answer.dead) == (1, 0, False)
    assert answer.seal is not None
    assert (answer.seal.num_tokens, answer.seal.num_ranges) == (8, (1, 1))
    assert answer.seal.first_token_id is None
    assert owner.num_held == 3
    assert owner.states() == [LeaseState.SEALED]


def test_a_repeated_request_gets_its_old_answer_again() -> None:
    owner = Asked()
    assert not owner.answers.repeat(REQUEST)
    answer = owner.pulled()
    assert owner.answers.repeat(REQUEST)
    assert sent(owner.news.take()) == [answer]
    other = LeaseRequest(READER, KEY, 2)
    assert one(owner.answers.refuse(other)) == LeaseRefused(KEY, 2)
    assert refused(owner, other)
    assert not owner.answers.repeat(LeaseRequest(READER_AGAIN, KEY, 1)), "another incarnation's"
    assert owner.table.num_live == 1


def test_a_committed_pull_is_let_go_and_says_no_more() -> None:
    owner = Asked()
    lease = owner.pulled().lease_id
    owner.let_request_go()
    actions = owner.table.on_commit(READER, commit(lease, counts=(1, 1)))
    assert actions[-1] == LeaseCommitted(KEY, lease, REQUEST)
    assert owner.num_held == 0
    assert owner.answers.repeat(REQUEST)
    assert owner.news.take() == []


def test_withdrawing_ends_the_lease_and_later_arrivals_get_none() -> None:
    owner = Asked()
    lease = owner.pulled().lease_id
    owner.let_request_go()
    actions = owner.answers.on_withdraw(READER, WithdrawLease(KEY, 1))
    assert actions[0] == LeaseEnded(KEY, lease, "withdrawn", REQUEST)
    assert owner.num_held == 0
    assert refused(owner, REQUEST)
    assert owner.answers.on_withdraw(READER, WithdrawLease(KEY, 1)) == []
    # A withdrawal that overtakes its request:
    owner.answers.on_withdraw(READER, WithdrawLease(KEY, 2))
    assert refused(owner, LeaseRequest(READER, KEY, 2))


def test_nobody_withdraws_anothers_request() -> None:
    owner = Asked()
    owner.pulled()
    assert owner.answers.on_withdraw(NEXT, WithdrawLease(KEY, 1)) == []
    assert owner.answers.on_withdraw(READER_AGAIN, WithdrawLease(KEY, 1)) == []
    assert owner.states() == [LeaseState.SEALED]


def test_a_pull_and_a_hand_over_of_one_generation_do_not_touch() -> None:
    owner = Asked()
    pull = owner.pulled().lease_id
    hand_over = owner.open()
    assert owner.table.on_ended(READER, Ended(KEY, "over"))[0] == LeaseEnded(KEY, hand_over, "over")
    assert [status.lease_id for status in owner.table.statuses()] == [pull]
    assert owner.table.end_key(KEY, "again") == []


def test_a_lost_reader_ends_its_pulls_at_once() -> None:
    owner = Asked()
    owner.pulled()
    owner.let_request_go()
    owner.answers.on_peer_lost(READER)
    assert sent(owner.table.on_peer_lost(0, READER)) == []
    assert owner.num_held == 0
    assert not owner.answers.repeat(REQUEST)


def test_answers_are_bounded() -> None:
    owner = Asked(answers_max=2)
    for number in range(1, 9):
        owner.answers.refuse(LeaseRequest(READER, KEY, number))
    known = [n for n in range(1, 9) if owner.answers.repeat(LeaseRequest(READER, KEY, n))]
    assert known == [7, 8]


# --- taking over


def test_an_orphaned_lease_is_used_by_a_transfer_only() -> None:
    owner = Asked()
    lease = owner.handed_over()
    assert owner.table.on_peer_lost(0, READER) == []
    assert owner.states() == [LeaseState.ORPHANED]
    assert owner.num_held == 3
    (answer,) = sent(owner.table.on_commit(READER, commit(lease)))
    assert isinstance(answer, CommitAnswer)
    assert not answer.ok
    (said,) = sent(owner.table.on_ask(READER, AskOffers(KEY, lease, 0)))
    assert isinstance(said, Offers)
    assert said.dead
    assert owner.table.on_ended(READER, Ended(KEY, "late")) == []
    assert owner.num_held == 3


def test_a_transfer_moves_the_blocks_in_one_step() -> None:
    owner = Asked()
    old = owner.handed_over()
    owner.table.on_peer_lost(0, READER)
    answer = granted(owner.takes())
    assert answer.key == NEXT_KEY
    assert answer.lease_id != old
    assert answer.seal is not None
    assert (answer.seal.num_tokens, answer.seal.first_token_id) == (8, 42)
    assert answer.seal.first_logprob == -0.5
    assert sum(r.num_blocks for r in answer.ranges) == owner.num_held == 3
    assert [status.reader for status in owner.table.statuses()] == [NEXT]
    (late,) = sent(owner.table.on_commit(READER, commit(old)))
    assert isinstance(late, CommitAnswer)
    assert not late.ok
    counts = answer.seal.num_ranges
    committing = commit(answer.lease_id, counts=counts, key=NEXT_KEY, epoch="S1")
    assert isinstance(owner.table.on_commit(NEXT, committing)[-1], LeaseCommitted)
    assert owner.num_held == 0


def test_a_transfer_may_come_before_the_loss_is_known() -> None:
    owner = Asked()
    old = owner.handed_over()
    granted(owner.takes())
    (late,) = sent(owner.table.on_commit(READER, commit(old)))
    assert isinstance(late, CommitAnswer)
    assert not late.ok
    assert owner.table.on_peer_lost(0, READER) == []
    assert owner.num_held == 3


def test_a_reader_that_has_more_gets_less_and_one_that_lacks_more_gets_none() -> None:
    owner = Asked()
    owner.handed_over()
    answer = granted(owner.takes(lacked=(1, 1)))
    assert [(r.group, r.block_index, r.num_blocks) for r in answer.ranges] == [(0, 1, 1), (1, 1, 1)]
    assert owner.num_held == 2
    for lacked in ((0, 0), (0,), (0, 1, 0)):
        owner = Asked()
        owner.handed_over()
        assert isinstance(owner.takes(lacked=lacked), LeaseRefused)
        assert owner.num_held == 3


def test_what_cannot_be_taken_over() -> None:
    owner = Asked()
    assert isinstance(owner.takes(), LeaseRefused), "never opened"
    owner = Asked()
    owner.open(first_lacked=(0, 1))
    assert isinstance(owner.takes(), LeaseRefused), "not sealed"
    owner = Asked()
    lease = owner.handed_over()
    owner.table.on_commit(READER, commit(lease))
    assert isinstance(owner.takes(), LeaseRefused), "committed"
    owner = Asked()
    owner.handed_over()
    owner.table.end_key(KEY, "over")
    assert isinstance(owner.takes(), LeaseRefused), "dead"
    owner = Asked()
    owner.handed_over()
    assert isinstance(owner.takes(key=RequestKey("another", 3)), LeaseRefused), "another request's"
    granted(owner.takes(2))
    assert isinstance(owner.takes(3, key=LATER_KEY), LeaseRefused), "taken already"
    granted(owner.takes(4, key=LATER_KEY, old=NEXT_KEY))


def test_nobody_takes_it_over_in_time() -> None:
    owner = Asked()
    owner.handed_over()
    owner.table.on_peer_lost(0, READER)
    owner.table.on_peer_lost(GRACE - 1, READER)  # the other stream's end: no second grace
    assert owner.table.next_expiry_ms() == GRACE
    assert owner.table.expire(GRACE - 1) == []
    assert isinstance(owner.table.expire(GRACE)[0], LeaseEnded)
    assert owner.num_held == 0


def test_without_a_grace_a_lost_reader_ends_the_lease() -> None:
    owner = Owner()
    owner.sealed()
    assert not [one for one in owner.table.on_peer_lost(0, READER) if isinstance(one, Send)]
    assert not owner.table.statuses()


def test_a_live_lease_keeps_the_record_of_its_request() -> None:
    owner = Asked(answers_max=2)
    owner.pulled()
    owner.let_request_go()
    for number in range(2, 9):
        owner.answers.refuse(LeaseRequest(READER, KEY, number))
    assert owner.answers.repeat(REQUEST)
    granted(owner.news.take())
    owner.answers.on_withdraw(READER, WithdrawLease(KEY, 1))
    assert owner.num_held == 0
    known = [n for n in range(2, 9) if owner.answers.repeat(LeaseRequest(READER, KEY, n))]
    assert len(known) <= 3
