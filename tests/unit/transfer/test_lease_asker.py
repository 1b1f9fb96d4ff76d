"""The reader's questions: repeated until answered, bounded, withdrawn when nobody waits."""

import pytest

from disagg.errors import InvariantViolation
from disagg.messages.peer import AskLease, Offers, TakeOver, WithdrawLease
from disagg.transfer.actions import Send
from disagg.transfer.lease_asker import Answer, LeaseAsker, TimedOut
from tests.unit.transfer.worlds import KEY, OTHER_KEY, OWNER, OWNER_AGAIN, SEAL, sent

TIMEOUT, TTL, REPEAT = 100, 1000, 30
QUESTION = AskLease(KEY, 0, 8, 0, (b"x" * 32,), (0,))


def asker() -> LeaseAsker:
    return LeaseAsker(timeout_ms=TIMEOUT, ttl_ms=TTL, repeat_ms=REPEAT)


def lease(number: int, *, dead: bool = False) -> Offers:
    seal = None if dead else SEAL
    return Offers(KEY, 0 if dead else 5, 0, (), seal, dead=dead, number=number)


def test_numbers_count_up_over_all_generations() -> None:
    one = asker()
    numbers = []
    for question in (QUESTION, TakeOver(OTHER_KEY, 0, KEY, (0,))):
        (message,) = sent([one.ask(0, OWNER, question)])
        assert isinstance(message, AskLease | TakeOver)
        numbers.append(message.number)
    assert numbers == [1, 2]
    with pytest.raises(InvariantViolation):
        one.ask(0, OWNER, QUESTION)


def test_a_question_is_repeated_until_it_is_answered() -> None:
    one = asker()
    asked = one.ask(0, OWNER, QUESTION)
    assert one.next_deadline_ms() == REPEAT
    assert one.tick(REPEAT - 1) == []
    assert one.tick(REPEAT) == [asked]
    assert one.on_offers(40, OWNER, lease(1)) is Answer.LEASE
    assert one.tick(2 * REPEAT) == []
    assert one.on_offers(50, OWNER, lease(1)) is Answer.KNOWN
    assert one.on_offers(50, OWNER, lease(1, dead=True)) is Answer.KNOWN, "the transfer's business"
    one.finished(KEY)
    assert one.next_deadline_ms() is None


def test_none_is_heard_once() -> None:
    one = asker()
    one.ask(0, OWNER, QUESTION)
    assert one.on_offers(0, OWNER, lease(1, dead=True)) is Answer.NONE
    assert one.on_offers(0, OWNER, lease(1, dead=True)) is Answer.STALE
    assert one.withdrawal(OWNER, lease(1, dead=True)) == []


def test_a_lease_nobody_waits_for_is_withdrawn() -> None:
    one = asker()
    one.ask(0, OWNER, QUESTION)
    assert one.give_up(KEY) == [Send(OWNER, WithdrawLease(KEY, 1))]
    assert one.give_up(KEY) == []
    assert one.on_offers(0, OWNER, lease(1)) is Answer.STALE
    assert one.withdrawal(OWNER, lease(1)) == [Send(OWNER, WithdrawLease(KEY, 1))]
    assert one.withdrawal(OWNER, lease(7)) == [], "never asked"


@pytest.mark.parametrize(
    ("sender", "number"), [(OWNER_AGAIN, 1), (OWNER, 2)], ids=["sender", "number"]
)
def test_only_the_answer_that_was_asked_for_counts(sender: object, number: int) -> None:
    one = asker()
    one.ask(0, OWNER, QUESTION)
    assert one.on_offers(0, sender, lease(number)) is Answer.STALE  # type: ignore[arg-type]
    assert one.on_offers(0, OWNER, lease(1)) is Answer.LEASE


def test_no_answer_and_no_commit_in_time() -> None:
    one = asker()
    one.ask(0, OWNER, QUESTION)
    assert one.tick(TIMEOUT) == [Send(OWNER, WithdrawLease(KEY, 1)), TimedOut(KEY)]
    one.ask(TIMEOUT, OWNER, QUESTION)
    assert one.on_offers(TIMEOUT, OWNER, lease(2)) is Answer.LEASE
    assert one.tick(TIMEOUT + TTL - 1) == []
    assert one.tick(TIMEOUT + TTL) == [Send(OWNER, WithdrawLease(KEY, 2)), TimedOut(KEY)]


def test_a_lost_owner_ends_its_questions() -> None:
    one = asker()
    one.ask(0, OWNER, QUESTION)
    one.ask(0, OWNER, TakeOver(OTHER_KEY, 0, KEY, (0,)))
    one.on_offers(0, OWNER, lease(1))
    assert one.on_peer_lost(OWNER_AGAIN) == []
    assert one.on_peer_lost(OWNER) == [OTHER_KEY], "the one being read fails by itself"
    assert one.next_deadline_ms() is None
