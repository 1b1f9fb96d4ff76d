"""Reserve before compute: rules of both sides, one test each."""

import pytest

from disagg.errors import InvariantViolation
from disagg.messages.peer import Release, Reserve, Reserved
from disagg.transfer.actions import Send
from disagg.transfer.reservation.requests import Granted, Refused, ReservationRequests
from disagg.transfer.reservation.table import Decide, Ignore, Refuse, Repeat, ReservationTable
from tests.unit.transfer.two_workers import KEY, OTHER_KEY, OWNER, OWNER_AGAIN, READER, READER_AGAIN

TTL, TIMEOUT = 1000, 100


def submitted() -> ReservationTable:
    table = ReservationTable(TTL)
    table.submitted(0, KEY, OWNER)
    return table


def granted(number: int = 1) -> ReservationTable:
    table = submitted()
    assert table.consider(OWNER, Reserve(KEY, number)) == Decide(KEY, number)
    table.decided(0, KEY, number, True, first_lacked=(2, 0))
    return table


def test_refused_unless_submitted_here_and_live() -> None:
    table = submitted()
    assert isinstance(table.consider(OWNER, Reserve(OTHER_KEY, 1)), Refuse)
    assert isinstance(table.consider(OWNER_AGAIN, Reserve(KEY, 1)), Refuse)
    assert isinstance(table.consider(OWNER, Reserve(KEY, 1)), Decide)
    assert not table.ended(KEY)
    assert isinstance(table.consider(OWNER, Reserve(KEY, 2)), Refuse)


def test_the_same_number_gets_its_old_answer_again() -> None:
    table = granted()
    grant = Reserved(KEY, 1, True, first_lacked=(2, 0))
    assert table.consider(OWNER, Reserve(KEY, 1)) == Repeat(grant)
    table.consider(OWNER, Reserve(KEY, 2))
    no = table.decided(0, KEY, 2, False, "full")
    assert table.consider(OWNER, Reserve(KEY, 2)) == Repeat(no)


def test_lower_numbers_are_ignored() -> None:
    table = granted(5)
    assert table.consider(OWNER, Reserve(KEY, 4)) == Ignore()
    assert table.num_granted == 1


def test_a_higher_number_replaces_the_old_reservation() -> None:
    table = granted()
    assert table.consider(OWNER, Reserve(KEY, 2)) == Decide(KEY, 2)
    table.decided(0, KEY, 2, True)
    assert not table.on_release(OWNER, Release(KEY, 1)), "1 was freed already: no double release"
    assert table.num_granted == 1
    with pytest.raises(InvariantViolation):
        table.decided(0, KEY, 1, True)


def test_release_frees_up_to_its_number_once() -> None:
    table = granted(3)
    assert not table.on_release(OWNER, Release(KEY, 2))
    assert not table.on_release(OWNER_AGAIN, Release(KEY, 3))
    assert not table.on_release(OWNER, Release(OTHER_KEY, 3))
    assert table.on_release(OWNER, Release(KEY, 3))
    assert not table.on_release(OWNER, Release(KEY, 3))
    assert isinstance(table.consider(OWNER, Reserve(KEY, 3)), Refuse)


def test_later_arrivals_up_to_a_release_are_refused() -> None:
    table = submitted()
    assert not table.on_release(OWNER, Release(KEY, 2))
    for number in (1, 2):
        assert isinstance(table.consider(OWNER, Reserve(KEY, number)), Refuse)
    assert isinstance(table.consider(OWNER, Reserve(KEY, 3)), Decide)


def test_time_to_live_ends_a_reservation_that_is_not_committed() -> None:
    table = granted()
    assert table.next_expiry_ms() == TTL
    assert table.expire(TTL - 1) == []
    assert table.expire(TTL) == [KEY]
    assert table.expire(TTL) == []
    assert isinstance(table.consider(OWNER, Reserve(KEY, 1)), Refuse), "its grant is not true now"


def test_what_is_committed_is_neither_released_nor_expired() -> None:
    table = granted()
    table.ended(KEY)
    assert not table.on_release(OWNER, Release(KEY, 9))
    assert table.expire(TTL) == []
    assert isinstance(table.consider(OWNER, Reserve(KEY, 10)), Refuse)


def test_ending_a_generation_says_whether_to_free() -> None:
    assert granted().ended(KEY)
    assert not submitted().ended(KEY)
    assert not submitted().ended(OTHER_KEY)


def one_request() -> tuple[ReservationRequests, int]:
    requests = ReservationRequests(TIMEOUT)
    send = requests.ask(0, KEY, READER)
    assert isinstance(send.message, Reserve)
    return requests, send.message.number


def test_numbers_count_up_and_one_request_is_open() -> None:
    requests, first = one_request()
    with pytest.raises(InvariantViolation):
        requests.ask(0, KEY, READER)
    assert requests.give_back(KEY) == [Send(READER, Release(KEY, first))]
    assert requests.give_back(KEY) == []
    again = requests.ask(0, KEY, READER)
    assert isinstance(again.message, Reserve)
    assert again.message.number > first


def test_an_answer_counts_once() -> None:
    requests, number = one_request()
    grant = Reserved(KEY, number, True, first_lacked=(1,))
    assert requests.on_answer(0, READER_AGAIN, Reserved(KEY, number, False, "no")) is None
    assert requests.on_answer(0, READER, grant) == Granted(KEY, (1,))
    assert requests.on_answer(0, READER, grant) is None
    assert requests.on_answer(0, READER, Reserved(KEY, number, False, "expired")) is None
    requests.handed_over(KEY)
    requests.handed_over(KEY)
    assert requests.give_back(KEY) == []
    assert requests.next_deadline_ms() is None


def test_a_refusal_ends_the_request() -> None:
    requests, number = one_request()
    assert requests.on_answer(0, READER, Reserved(KEY, number, False, "full")) == Refused(
        KEY, "full"
    )
    assert requests.give_back(KEY) == []


def test_no_answer_in_time_counts_as_no_and_is_followed_by_release() -> None:
    requests, number = one_request()
    assert requests.next_deadline_ms() == TIMEOUT
    assert requests.tick(TIMEOUT - 1) == []
    release = Send(READER, Release(KEY, number))
    assert requests.tick(TIMEOUT) == [Refused(KEY, "timeout"), release]
    assert requests.on_answer(0, READER, Reserved(KEY, number, True)) == release, "a stale grant"
    assert requests.on_answer(0, READER, Reserved(KEY, number, False)) is None
    assert requests.on_answer(0, READER, Reserved(KEY, number + 7, True)) is None, "never requested"


def test_a_stale_yes_does_not_free_the_newer_reservation() -> None:
    requests, first = one_request()
    table = granted(first)
    requests.tick(TIMEOUT)
    second = requests.ask(TIMEOUT, KEY, READER).message
    assert isinstance(second, Reserve)
    table.consider(OWNER, second)
    table.decided(0, KEY, second.number, True)
    late = requests.on_answer(0, READER, Reserved(KEY, first, True))
    assert isinstance(late, Send)
    assert isinstance(late.message, Release)
    assert not table.on_release(OWNER, late.message)
    assert table.num_granted == 1


def test_a_lost_peer_is_a_no() -> None:
    requests, _ = one_request()
    assert requests.on_peer_lost(READER_AGAIN) == []
    assert requests.on_peer_lost(READER) == [Refused(KEY, "peer_lost")]
    assert requests.give_back(KEY) == []
