"""Requests that live, without a router: what their clients and observers hear, and the bound."""

from types import SimpleNamespace

import pytest

from disagg.errors import CapacityError, RemoteFault
from disagg.messages.outputs import FinishReason
from disagg.router.client_requests import PROMPT_LOGPROBS_SHARE, ClientRequests
from disagg.routing.actions import Deliver


class Told:
    """Stands for the stream and the observer of a request, and notes what each is told."""

    def __init__(self, request_id, num_prompt_numbers=0):
        self.request_id = request_id
        self.request = request(request_id, num_prompt_numbers)
        self.told = []

    def put(self, delta):
        self.told.append(("put", delta))

    def fail(self, error):
        self.told.append(("fail", error))

    def delivered(self, num_tokens, record):
        self.told.append(("delivered", num_tokens, record(self.request_id)))

    def ended(self, outcome, record, error=""):
        self.told.append(("ended", outcome, record, error))


def request(request_id, num_prompt_numbers=0):
    return SimpleNamespace(request_id=request_id, num_prompt_numbers=num_prompt_numbers)


def tokens(*token_ids, finish=FinishReason.NONE):
    return Deliver("r", token_ids, (), finish)


def record_of(request_id):
    return f"record of {request_id}"


@pytest.fixture
def live():
    return ClientRequests(record_of, 10)


def add(live, request_id, num_prompt_numbers=0):
    told = Told(request_id, num_prompt_numbers)
    live.add(told, told)
    return told


def test_tokens_are_observed_before_the_client_has_them_and_the_last_ones_end_it(live):
    told = add(live, "r")
    first, last = tokens(5), tokens(6, 7, finish=FinishReason.STOP)
    live.deliver(first)
    live.deliver(last)
    record = record_of("r")
    assert told.told == [
        ("delivered", 1, record),
        ("put", first),
        ("delivered", 2, record),
        ("ended", "stop", record, ""),
        ("put", last),
    ]
    assert list(live) == []
    live.deliver(first)  # of one that has ended
    assert len(told.told) == 5


def test_who_fails_is_observed_and_told_why_once(live):
    told, error = add(live, "r"), RemoteFault("the worker was lost")
    for _ in range(2):
        live.fail("r", error)
    ended = ("ended", error.code, record_of("r"), error.message)
    assert told.told == [ended, ("fail", error)]


def test_who_is_taken_out_hears_nothing_more(live):
    told = add(live, "r")
    assert live.pop("r") == (told, told)
    assert live.pop("r") is None
    live.deliver(tokens(5))
    live.fail("r", RemoteFault("late"))
    assert told.told == []


def test_some_may_end_while_all_are_looked_at(live):
    for name in "abc":
        add(live, name)
    seen = []
    for one in live:
        seen.append(one.stream.request_id)
        live.pop("b")
    assert seen == ["a", "b", "c"]
    assert [one.stream.request_id for one in live] == ["a", "c"]


def test_log_probabilities_of_prompts_are_bounded_over_all_that_live(live):
    bound = 10 * PROMPT_LOGPROBS_SHARE
    add(live, "a", bound - 10)
    live.check_prompt_logprobs(request("b", 10))
    add(live, "b", 10)
    with pytest.raises(CapacityError, match=f"have {bound} .* at most {bound}"):
        live.check_prompt_logprobs(request("c", 1))
    live.check_prompt_logprobs(request("c"))  # control: it asks for none
    live.pop("a")
    live.check_prompt_logprobs(request("c", 1))
