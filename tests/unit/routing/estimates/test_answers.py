"""Whose answers are decoded where, and how far they are."""

from dataclasses import dataclass

from disagg.messages.identity import Incarnation
from disagg.routing.estimates.answers import ANSWERS_MAX, Answer, Answers
from disagg.routing.slo import NO_SLO, Slo

A, B = Incarnation("a", "1"), Incarnation("b", "1")


@dataclass
class Request:
    request_id: str
    slo: Slo = NO_SLO
    first_token_ms: int | None = None
    num_tokens: int = 0
    num_tokens_left: int = 100


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
    assert (answers._at, answers._where) == ({}, {}), "nothing stays of it"


def test_of_a_worker_some_are_looked_at() -> None:
    answers = Answers()
    for number in range(ANSWERS_MAX + 1):
        answers.begin(A, Request(str(number), num_tokens_left=number + 2))
    found = answers.at(0, A, 1_000)
    assert [one.num_left for one in found] == list(range(1, ANSWERS_MAX + 1)), "the oldest ones"


def test_time_per_token_is_of_all_of_an_answer() -> None:
    one = Answer(num_tokens=10, num_left=10, took_ms=100)
    assert one.tpot_ms(20, 0) == (100 + 200) / 20
    assert one.tpot_ms(20, 60) == (100 + 200 + 60) / 20
