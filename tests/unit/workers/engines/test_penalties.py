"""Bias and penalties: the definitions of OpenAI and vLLM, and the tokens they look back on."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.scheduling.step import SequenceSlice
from disagg.workers.engines.sampler import Sampler, sample
from disagg.workers.engines.token_history import TokenCounts, TokenHistories

VOCAB = 20
KEY = RequestKey("r", 1)
PENALTIES = SamplingParams(
    max_tokens=1,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias=((3, 2.5), (7, -100.0)),
    num_prompt_tokens=6,
)
TOKENS = [1, 2, 2, 3, 4, 5, 6, 6, 6, 2, 8]


def by_definition(
    logits: torch.Tensor, tokens: Sequence[int], params: SamplingParams
) -> torch.Tensor:
    """Logits [vocab_size] after bias and penalties, a token at a time."""
    answer = Counter(tokens[params.num_prompt_tokens :])
    result = logits.clone()
    for token, bias in params.logit_bias:
        result[token] += bias
    for token in range(len(logits)):
        value = float(result[token])
        if token in tokens:
            value = (
                value / params.repetition_penalty
                if value > 0
                else value * params.repetition_penalty
            )
        value -= params.frequency_penalty * answer[token]
        value -= params.presence_penalty * (token in answer)
        result[token] = value
    return result


def part_of(
    tokens: Sequence[int],
    start: int,
    end: int,
    params: SamplingParams | None,
    *,
    is_new: bool = False,
    key: RequestKey = KEY,
) -> SequenceSlice:
    known = tuple(tokens) if is_new else ()
    return SequenceSlice(key, tuple(tokens[start:end]), start, is_new, (), params, known)


def counts_of(tokens: Sequence[int], params: SamplingParams) -> TokenCounts | None:
    histories = TokenHistories()
    part = part_of(tokens, 0, len(tokens), params, is_new=True)
    histories.apply((), [part])
    return histories.before(part)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    num_prompt_tokens=st.integers(1, 30),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.1, 10),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4),
    others=st.booleans(),
)
def test_logits_change_by_the_definition(
    seed: int,
    tokens: list[int],
    num_prompt_tokens: int,
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
    others: bool,
) -> None:
    params = SamplingParams(
        1,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=tuple(sorted(bias.items())),
        num_prompt_tokens=min(num_prompt_tokens, len(tokens)),
    )
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    before = logits.clone()
    plain = SamplingParams(1, num_logprobs=2)
    rows = [plain, params, PENALTIES if others else plain]
    seen = [None, counts_of(tokens, params), counts_of(TOKENS, PENALTIES) if others else None]
    drawn = sample(logits, rows, [5, len(tokens), 11], seen)
    assert torch.equal(logits, before)
    assert drawn[0].token_id == int(logits[0].argmax())
    assert drawn[0].logprobs is not None  # of the logits as the model gave them
    expected = by_definition(logits[1], tokens, params)
    assert float(expected[drawn[1].token_id]) == pytest.approx(float(expected.max()), abs=1e-4)


def test_they_are_what_vllm_computes() -> None:
    layers = pytest.importorskip("vllm.model_executor.layers.utils", exc_type=ImportError)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    params = replace(PENALTIES, logit_bias=())
    cut = params.num_prompt_tokens
    theirs = layers.apply_penalties(
        logits.clone(),
        torch.tensor([TOKENS[:cut]]),
        torch.tensor([TOKENS[cut:]]),
        torch.tensor([params.presence_penalty]),
        torch.tensor([params.frequency_penalty]),
        torch.tensor([params.repetition_penalty]),
    )
    assert by_definition(logits[0], TOKENS, params).tolist() == pytest.approx(theirs[0].tolist())


def test_a_strong_bias_forces_and_bans_a_token() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    for temperature in (0.0, 1.0):
        hot = SamplingParams(1, temperature=temperature)
        forced = replace(hot, logit_bias=((9, 100.0),))
        best = int(logits.argmax())
        banned = replace(hot, logit_bias=((best, -100.0),))
        for position in range(50):
            assert sample(logits, [forced], [position])[0].token_id == 9
            assert sample(logits, [banned], [position])[0].token_id != best


def test_logprobs_are_of_the_logits_before_penalties() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    params = replace(PENALTIES, num_logprobs=3, logit_bias=((9, 100.0),))
    (token,) = sample(logits, [params], [len(TOKENS)], [counts_of(TOKENS, params)])
    raw = logits[0].log_softmax(0)
    assert token.token_id == 9
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(raw[9]))
    assert token.logprobs.top[0][0] == int(raw.argmax())


class Model:
    """Logits that are a function of the sequence's tokens."""

    def __init__(self) -> None:
        self._table = torch.randn(64, 200, generator=torch.Generator().manual_seed(8)) * 2

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._table[(sum(tokens) + len(tokens)) % 64]


def answer(
    params: SamplingParams, prompt: list[int], number: int, rng: random.Random | None
) -> list[int]:
    """Generate; with ``rng`` through chunks, fresh starts elsewhere, repeated slices."""
    model, sampler = Model(), Sampler()
    tokens, is_new, start = list(prompt), True, 0
    params = replace(params, num_prompt_tokens=len(prompt))
    while len(tokens) < len(prompt) + number:
        end = len(tokens)
        if rng is not None:
            if rng.random() < 0.2:  # preempted, moved, or handed over
                sampler, is_new = Sampler() if rng.random() < 0.5 else sampler, True
                start = rng.randrange(len(tokens))  # so much is cached there
            end = rng.randint(start + 1, len(tokens))
        part = part_of(tokens, start, end, params if end == len(tokens) else None, is_new=is_new)
        sampler.apply((), [part])
        is_new, start = False, end
        if part.sampling is None:
            continue
        logits = model.logits(tokens)[None]
        (sampled,) = sampler.sample(logits, [part])
        if rng is not None and rng.random() < 0.2:  # that step failed, it is computed again
            again = replace(part, is_new=False)
            assert sampler.sample(logits, [again]) == [sampled]
        tokens.append(sampled.token_id)
    return tokens[len(prompt) :]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 1.0]),
    presence=st.sampled_from([0.0, 1.5]),
    frequency=st.sampled_from([0.0, -0.8]),
    repetition=st.sampled_from([1.0, 1.4]),
)
def test_a_token_depends_on_the_tokens_before_it_alone(
    seed: int, temperature: float, presence: float, frequency: float, repetition: float
) -> None:
    """Not on chunks, on where it began anew, or on how often a slice was computed."""
    rng = random.Random(seed)
    params = SamplingParams(
        1,
        temperature=temperature,
        top_p=0.9,
        seed=seed,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    prompt = [rng.randrange(200) for _ in range(rng.randint(1, 20))]
    assert answer(params, prompt, 25, rng) == answer(params, prompt, 25, None)


def test_penalties_are_felt() -> None:
    """Control of the test above: the answers do depend on what stands before."""
    plain = SamplingParams(1, temperature=1.0)
    prompt = list(range(0, 200, 3))
    answers = {
        tuple(answer(params, prompt, 80, None))
        for params in (
            plain,
            replace(plain, presence_penalty=2.0),
            replace(plain, frequency_penalty=2.0),
            replace(plain, repetition_penalty=2.0),
        )
    }
    assert len(answers) == 4


def test_prompt_and_answer_are_told_apart() -> None:
    """A generation that is planned anew has its answer so far among the tokens to prefill."""
    counts = counts_of(TOKENS, PENALTIES)
    assert counts is not None
    found = dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {1: 0, 2: 1, 3: 0, 4: 0, 5: 0, 6: 3, 8: 1}
    without = counts_of(TOKENS, replace(PENALTIES, repetition_penalty=1.0))
    assert without is not None
    found = dict(zip(without.token_ids.tolist(), without.counts.tolist(), strict=True))
    assert found == {6: 3, 2: 1, 8: 1}


def test_nothing_is_kept_of_what_ended_or_has_no_penalties() -> None:
    sampler, logits = Sampler(), torch.zeros(1, VOCAB)
    plain = SamplingParams(1)
    for number, params in enumerate((plain, PENALTIES, None)):
        key = RequestKey(str(number), 1)
        part = part_of(TOKENS, 0, len(TOKENS), params, is_new=True, key=key)
        sampler.apply((), [part])
        if params is not None:
            assert len(sampler.sample(logits, [part])) == 1
    assert len(sampler.histories) == 2  # the one with penalties, the one that has not sampled yet
    ended = tuple(RequestKey(str(number), 1) for number in range(3))
    sampler.apply(ended, ())
    assert len(sampler.histories) == 0
