"""Log-probabilities of a prompt reach its client once and whole, whatever becomes of workers."""

from dataclasses import replace

import pytest

from disagg.errors import ProtocolError, RemoteFault, RequestError
from disagg.messages.outputs import FinishReason, PromptLogprobs, SequenceOutput, StepOutputs
from disagg.messages.registration import WorkerInfo
from disagg.messages.sampling import TokenLogprobs
from disagg.messages.session import EndReason
from disagg.messages.submit import Role, Submit
from disagg.routing.actions import Deliver, NewRequest
from disagg.routing.prompt_scores import PromptScores
from tests.unit.routing.builders import STATS, Router, request, worker

P, D, D2 = worker("p", "prefill"), worker("d", "decode"), worker("d2", "decode")
NUM_TOKENS = 10


def scored_request(max_tokens: int = 5) -> NewRequest:
    plain = request(num_tokens=NUM_TOKENS, max_tokens=max_tokens)
    return replace(plain, sampling=replace(plain.sampling, num_prompt_logprobs=1))


def score_of(position: int, worker_number: int = 0) -> TokenLogprobs:
    """Two workers' differ, so that a mixture would be seen."""
    return TokenLogprobs(-position - worker_number / 8, ((position, -0.5),), 1 + position)


def whole(worker_number: int = 0) -> tuple[TokenLogprobs | None, ...]:
    return (None, *(score_of(at, worker_number) for at in range(1, NUM_TOKENS)))


class Scored(Router):
    """A router with one such request."""

    def __init__(self, *workers: WorkerInfo, max_tokens: int = 5, replans_max: int = 3) -> None:
        super().__init__(*workers, replans_max=replans_max)
        self.generate(scored_request(max_tokens))

    def say(
        self, who: WorkerInfo, submit: Submit, first: int, end: int, number: int = 0, *tokens: int
    ) -> None:
        """Scores from one position up to another, and tokens behind them in the same message."""
        scores = tuple(score_of(at, number) for at in range(first, end))
        outputs = (SequenceOutput(submit.key, NUM_TOKENS, tokens),) if tokens else ()
        message = StepOutputs(outputs, (PromptLogprobs(submit.key, first, scores),))
        self.did(self.core.from_worker(self.now_ms, who.incarnation, message))

    @property
    def scores(self) -> list[tuple[TokenLogprobs | None, ...]]:
        """Those that were delivered by the last call."""
        return [
            a.prompt_logprobs for a in self.actions if isinstance(a, Deliver) and a.prompt_logprobs
        ]


def test_they_come_with_the_first_token_and_never_again() -> None:
    router = Scored(P, D)
    (_, decode), (_, prefill) = router.submits
    assert prefill.sampling.num_prompt_logprobs == decode.sampling.num_prompt_logprobs == 1
    router.say(P, prefill, 1, 4)
    assert router.actions == []
    router.say(P, prefill, 4, NUM_TOKENS, 0, 7)
    assert (router.scores, router.delivered) == ([whole()], [7])
    router.tokens(D, decode, NUM_TOKENS, 7, 8)
    assert (router.scores, router.delivered) == ([], [8])


def test_tokens_of_the_decode_worker_wait_for_them() -> None:
    """Its stream may overtake the prefill worker's."""
    router = Scored(P, D)
    (_, decode), (_, prefill) = router.submits
    router.pulled(D, P, decode)
    router.tokens(D, decode, NUM_TOKENS, 7, 8, 9, 10, 11, finish=FinishReason.LENGTH)
    assert router.actions == []
    router.say(P, prefill, 1, NUM_TOKENS)
    assert (router.scores, router.delivered) == ([whole()], [7, 8, 9, 10, 11])
    assert router.finish == [FinishReason.LENGTH]


@pytest.mark.parametrize("late", [False, True], ids=["lost after a token", "lost before it"])
def test_a_prefill_worker_lost_with_a_part_of_them_is_planned_anew(*, late: bool) -> None:
    """Also when the decode worker has all it needs to go on: nothing may be missing."""
    router = Scored(P, D, D2)
    decode = router.submits[0][1]
    assert decode.role is Role.DECODE
    other = D if router.submits[0][0] == "d" else D2
    router.say(P, router.submits[1][1], 1, 4)
    router.pulled(other, P, decode)
    if not late:
        router.tokens(other, decode, NUM_TOKENS, 7)
        assert router.actions == []
    router.lost(P)
    if late:
        assert router.submits == []
        router.tokens(other, decode, NUM_TOKENS, 7)
    ((who, again),) = router.submits
    assert again.token_ids == decode.token_ids
    assert again.sampling.num_prompt_logprobs == 1
    by_name = {"d": D, "d2": D2}[who]
    router.say(by_name, again, 1, NUM_TOKENS, 2, 7)
    assert (router.scores, router.delivered) == ([whole(2)], [7])
    assert "gap" in router.record("r").generations[0].cause


@pytest.mark.parametrize("accepted", [True, False])
def test_who_has_them_all_does_not_ask_again(*, accepted: bool) -> None:
    router = Scored(P, D)
    prefill = router.submits[1][1]
    router.say(P, prefill, 1, NUM_TOKENS, 0, *((7,) if accepted else ()))
    assert router.scores == [whole()] * accepted
    router.ended(P, prefill, EndReason.LEASE_DEAD)
    ((who, again),) = router.submits
    assert again.sampling.num_prompt_logprobs is None
    router.tokens(P if who == "p" else D, again, NUM_TOKENS + accepted, 8)
    assert (router.scores, router.delivered) == ([] if accepted else [whole()], [8])


def test_a_take_over_asks_for_none() -> None:
    router = Scored(P, D, D2)
    router.say(P, router.submits[1][1], 1, NUM_TOKENS, 0, 7)
    first = router.record("r").generations[0]
    assert first.decode in (D.incarnation, D2.incarnation)
    router.lost(D if first.decode == D.incarnation else D2)
    assert all(one.sampling.num_prompt_logprobs is None for _, one in router.submits)
    assert router.submits


def test_no_tokens_are_wanted() -> None:
    router = Scored(P, max_tokens=0)
    ((_, submit),) = router.submits
    assert submit.sampling.max_tokens == 1
    router.say(P, submit, 1, NUM_TOKENS)
    assert router.actions == []
    router.tokens(P, submit, NUM_TOKENS, 7, finish=FinishReason.STOP)
    assert (router.scores, router.delivered) == ([whole()], [])
    assert router.finish == [FinishReason.LENGTH]
    with pytest.raises(RequestError, match="max_tokens"):
        Router(P).generate(request(max_tokens=-1))


def test_a_worker_that_sends_tokens_and_no_scores_is_not_believed() -> None:
    """As one of a version before this would, whoever it works with."""
    for workers in ((P,), (P, D)):
        router = Scored(*workers, replans_max=1)
        for _ in range(2):
            submit = router.submits[-1][1]
            who = P if router.submits[-1][0] == "p" else D
            router.tokens(who, submit, NUM_TOKENS, 7, finish=FinishReason.STOP)
            assert router.delivered == []
        assert isinstance(router.error, RemoteFault)
        assert "log-probabilities" in router.error.message


@pytest.mark.parametrize(("first", "end"), [(0, 3), (2, 4), (1, 11)])
def test_what_does_not_follow_ends_the_request(first: int, end: int) -> None:
    router = Scored(P)
    router.say(P, router.submits[0][1], first, end)
    assert isinstance(router.error, ProtocolError)


def test_what_was_not_requested_or_not_computed_there_ends_the_request() -> None:
    router = Router(P)
    router.generate()
    key = router.submits[0][1].key
    message = StepOutputs((), (PromptLogprobs(key, 1, (score_of(1),)),))
    router.did(router.core.from_worker(0, P.incarnation, message))
    assert isinstance(router.error, ProtocolError)
    two = Scored(P, D)
    two.say(D, two.submits[0][1], 1, 4)
    assert isinstance(two.error, ProtocolError)


def test_caches_do_not_decide_who_computes() -> None:
    """A hit would be of no use, so the least loaded prefills and nothing is pulled."""
    both = [worker(name) for name in "abc"]
    router = Router(*both)
    new = scored_request()
    router.holds(both[2], new.token_ids)
    router.generate(new)
    assert all(submit.pull is None for _, submit in router.submits)
    assert router.record("r").generations[0].expected_hit_tokens == 0
    plain = Router(*both)  # control: without them the hit decides
    plain.holds(both[2], new.token_ids)
    plain.generate(request(num_tokens=NUM_TOKENS))
    assert plain.record("r").generations[0].expected_hit_tokens == 8


def test_a_prompt_of_one_token_has_nothing_to_wait_for() -> None:
    scores = PromptScores(1, 3)
    assert scores.complete
    assert scores.take() == (None,)
    assert scores.take() == ()


def test_progress_renews_patience() -> None:
    router = Scored(P)
    submit = router.submits[0][1]
    for position in range(1, 6):
        router.now_ms += 800
        router.say(P, submit, position, position + 1)
        router.core.from_worker(router.now_ms, P.incarnation, STATS)
        assert router.did(router.core.tick(router.now_ms)) == []
