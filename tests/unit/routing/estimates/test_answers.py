"""Whose answers are decoded where, and how far they are."""

from dataclasses import dataclass

from disagg.messages.identity import Incarnation
from disagg.routing.estimates.answers import ANSWERS_MAX, Answer, Answers, Steps
from disagg.routing.slo import NO_SLO, Slo

A, B = Incarnation("a", "1"), Incarnation("b", "1")


@dataclass
class Request:
    request_id: str
    slo: Slo = NO_SLO
    first_token_ms: int | None = None
    num_tokens: int = 0
    num_tokens_left: int = 100
    expected_ms: float = 0.0


def test_an_answer_is_expected_to_be_as_long_as_others_but_no_longer_than_it_may_be() -> None:
    answers = Answers()
    begun = Request("begun", Slo(0, 40.0), 1_000, 11)
    answers.begin(A, begun)
    answers.begin(A, Request("waits", num_tokens_left=17))
    assert answers.at(1_500, A, 50) == (
        Answer(10, 50, 500, 40.0),
        Answer(0, 16, 0, has_begun=False),
    )
    begun.num_tokens_left = 3
    assert answers.at(1_500, A, 50)[0].num_left == 3
    begun.num_tokens_left = 0
    assert answers.at(1_500, A, 50)[0].num_left == 1, "it has not ended yet"


def test_a_request_is_at_one_worker_until_it_ends() -> None:
    answers = Answers()
    answers.begin(A, Request("one"))
    answers.begin(B, Request("one"))
    assert (len(answers.at(0, A, 50)), len(answers.at(0, B, 50))) == (0, 1)
    answers.end("one")
    answers.end("one")
    assert not answers.at(0, B, 50)
    assert (answers._requests._at, answers._requests._where) == ({}, {}), "nothing stays of it"


def test_of_a_worker_some_are_looked_at() -> None:
    answers = Answers()
    for number in range(ANSWERS_MAX + 1):
        answers.begin(A, Request(str(number), num_tokens_left=number + 2))
    found = answers.at(0, A, 1_000)
    assert [one.num_left for one in found] == list(range(1, ANSWERS_MAX + 1)), "the oldest ones"


def test_time_per_token_is_of_all_of_an_answer() -> None:
    one = Answer(num_tokens=10, num_left=10, took_ms=100)
    assert one.tpot_ms(Steps(20, 0)) == (100 + 200) / 20
    assert one.tpot_ms(Steps(20, 60)) == (100 + 200 + 60) / 20


def test_who_begins_later_is_held_up_by_what_is_left_by_then() -> None:
    steps = Steps(20, 90, new_pause_ms=60, new_until_ms=100)
    for begins_ms, pause_ms in ((0, 60), (40, 60), (70, 30), (100, 0), (1_000, 0)):
        one = Answer(0, 10, 0, has_begun=False, begins_ms=begins_ms)
        assert one.tpot_ms(steps) == (200 + pause_ms) / 10, begins_ms
    assert Answer(0, 10, 0).tpot_ms(steps) == (200 + 90) / 10, "control: it has begun"


def test_an_answer_begins_when_its_plan_says() -> None:
    answers = Answers()
    answers.begin(A, Request("planned", expected_ms=1_800))
    for now_ms, begins_ms in ((1_500, 300), (1_800, 0), (2_000, 0)):
        (found,) = answers.at(now_ms, A, 50)
        assert found.begins_ms == begins_ms
