"""Leases that readers ask for: born sealed, answered once per number, taken over in one step."""

from disagg.messages.identity import Incarnation, Question, RequestKey
from disagg.messages.peer import AskOffers, CommitAnswer, Ended, Offers, TakeOver, WithdrawLease
from disagg.transfer.actions import LeaseAction, LeaseCommitted, LeaseEnded, Send
from disagg.transfer.asked_leases import AskedLeases
from disagg.transfer.lease_states import LeaseState
from disagg.transfer.leases import LeaseTable
from tests.unit.transfer.worlds import KEY, OWNER, READER, READER_AGAIN, TTL, Owner, commit, sent

NEXT = Incarnation("reader 2", "S1")
NEXT_KEY = RequestKey(KEY.request_id, KEY.generation + 1)
LATER_KEY = RequestKey(KEY.request_id, KEY.generation + 2)
GRACE = 200
QUESTION = Question(READER, KEY, 1)


class Asked(Owner):
    """An owner whose table waits for another reader, and its questions."""

    def __init__(self, answers_max: int = 2) -> None:
        super().__init__()
        self.table = LeaseTable(OWNER, self.pool, ttl_ms=TTL, committed_max=2, take_over_ms=GRACE)
        self.asked = AskedLeases(self.table, answers_max)

    def pulled(self, question: Question = QUESTION) -> Offers:
        """A prefix pull of two blocks of group 0 and one of group 1."""
        b = self.blocks
        blocks = [[(0, b[0]), (1, b[1])], [(1, b[4])]]
        return one(self.asked.open_sealed(0, question, blocks, 8))

    def handed_over(self, first_lacked: tuple[int, ...] = (0, 1)) -> int:
        """A sealed lease whose reader lacked from these positions on; the request is over."""
        lease = self.table.open(0, KEY, READER, first_lacked)
        self.table.offer(0, lease, [[(0, self.blocks[0])], []])
        self.table.seal(0, lease, [[(1, self.blocks[1])], [(1, self.blocks[4])]], 8, 42, -0.5)
        self.let_request_go()
        return lease

    def takes(self, number: int = 1, lacked: tuple[int, ...] = (0, 1), **more: object) -> Offers:
        key, old = more.get("key", NEXT_KEY), more.get("old", KEY)
        assert isinstance(key, RequestKey)
        assert isinstance(old, RequestKey)
        return one(self.asked.transfer(0, NEXT, TakeOver(key, number, old, lacked)))

    @property
    def num_held(self) -> int:
        return self.free - self.pool.num_free

    def states(self) -> list[LeaseState]:
        return [status.state for status in self.table.statuses()]


def one(actions: list[LeaseAction]) -> Offers:
    """The answer among them."""
    *_, answer = sent(actions)
    assert isinstance(answer, Offers)
    return answer


def test_a_pull_is_born_sealed_with_everything_in_the_answer() -> None:
    owner = Asked()
    answer = owner.pulled()
    owner.let_request_go()
    assert (answer.number, answer.first, answer.dead) == (1, 0, False)
    assert answer.seal is not None
    assert (answer.seal.num_tokens, answer.seal.num_ranges) == (8, (1, 1))
    assert answer.seal.first_token_id == -1
    assert owner.num_held == 3
    assert owner.states() == [LeaseState.SEALED]


def test_a_repeated_question_gets_its_old_answer_again() -> None:
    owner = Asked()
    assert owner.asked.repeated(QUESTION) is None
    answer = owner.pulled()
    assert sent(owner.asked.repeated(QUESTION) or []) == [answer]
    refused = Question(READER, KEY, 2)
    assert one(owner.asked.refuse(refused)).dead
    assert one(owner.asked.repeated(refused) or []).dead
    assert owner.asked.repeated(Question(READER_AGAIN, KEY, 1)) is None, "another incarnation's"
    assert owner.table.num_live == 1


def test_a_committed_pull_is_let_go_and_says_no_more() -> None:
    owner = Asked()
    lease = owner.pulled().lease_id
    owner.let_request_go()
    actions = owner.table.on_commit(READER, commit(lease, counts=(1, 1)))
    assert actions[-1] == LeaseCommitted(KEY, lease, QUESTION)
    assert owner.num_held == 0
    assert owner.asked.repeated(QUESTION) == []


def test_withdrawing_ends_the_lease_and_later_arrivals_get_none() -> None:
    owner = Asked()
    lease = owner.pulled().lease_id
    owner.let_request_go()
    actions = owner.asked.on_withdraw(READER, WithdrawLease(KEY, 1))
    assert actions[0] == LeaseEnded(KEY, lease, "withdrawn", QUESTION)
    assert owner.num_held == 0
    assert one(owner.asked.repeated(QUESTION) or []).dead
    assert owner.asked.on_withdraw(READER, WithdrawLease(KEY, 1)) == []
    # A withdrawal that overtakes its question:
    owner.asked.on_withdraw(READER, WithdrawLease(KEY, 2))
    assert one(owner.asked.repeated(Question(READER, KEY, 2)) or []).dead


def test_nobody_withdraws_anothers_question() -> None:
    owner = Asked()
    owner.pulled()
    assert owner.asked.on_withdraw(NEXT, WithdrawLease(KEY, 1)) == []
    assert owner.asked.on_withdraw(READER_AGAIN, WithdrawLease(KEY, 1)) == []
    assert owner.states() == [LeaseState.SEALED]


def test_a_pull_and_a_hand_over_of_one_generation_do_not_touch() -> None:
    owner = Asked()
    pull = owner.pulled().lease_id
    hand_over = owner.table.open(0, KEY, READER)
    assert owner.table.on_ended(READER, Ended(KEY, "over"))[0] == LeaseEnded(KEY, hand_over, "over")
    assert [status.lease_id for status in owner.table.statuses()] == [pull]
    assert owner.table.end_key(KEY, "again") == []


def test_a_lost_reader_ends_its_pulls_at_once() -> None:
    owner = Asked()
    owner.pulled()
    owner.let_request_go()
    owner.asked.on_peer_lost(READER)
    assert sent(owner.table.on_peer_lost(0, READER)) == []
    assert owner.num_held == 0
    assert owner.asked.repeated(QUESTION) is None


def test_answers_are_bounded() -> None:
    owner = Asked(answers_max=2)
    for number in range(1, 9):
        owner.asked.refuse(Question(READER, KEY, number))
    known = [n for n in range(1, 9) if owner.asked.repeated(Question(READER, KEY, n)) is not None]
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
    answer = owner.takes()
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
    assert not owner.takes().dead
    (late,) = sent(owner.table.on_commit(READER, commit(old)))
    assert isinstance(late, CommitAnswer)
    assert not late.ok
    assert owner.table.on_peer_lost(0, READER) == []
    assert owner.num_held == 3


def test_a_reader_that_has_more_gets_less_and_one_that_lacks_more_gets_none() -> None:
    owner = Asked()
    owner.handed_over()
    answer = owner.takes(lacked=(1, 1))
    assert [(r.group, r.position, r.num_blocks) for r in answer.ranges] == [(0, 1, 1), (1, 1, 1)]
    assert owner.num_held == 2
    for lacked in ((0, 0), (0,), (0, 1, 0)):
        owner = Asked()
        owner.handed_over()
        assert owner.takes(lacked=lacked).dead
        assert owner.num_held == 3


def test_what_cannot_be_taken_over() -> None:
    owner = Asked()
    assert owner.takes().dead, "never opened"
    owner = Asked()
    owner.table.open(0, KEY, READER, (0, 1))
    assert owner.takes().dead, "not sealed"
    owner = Asked()
    lease = owner.handed_over()
    owner.table.on_commit(READER, commit(lease))
    assert owner.takes().dead, "committed"
    owner = Asked()
    owner.handed_over()
    owner.table.end_key(KEY, "over")
    assert owner.takes().dead, "dead"
    owner = Asked()
    owner.handed_over()
    assert owner.takes(key=RequestKey("another", 3)).dead, "another request's"
    assert not owner.takes(2).dead
    assert owner.takes(3, key=LATER_KEY).dead, "taken already"
    assert not owner.takes(4, key=LATER_KEY, old=NEXT_KEY).dead, "taken from the one who took it"


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
