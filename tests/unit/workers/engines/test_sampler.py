"""Sampling: greedy, temperature, top-k, top-p; a function of logits, seed and position alone."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.workers.engines import draw
from disagg.workers.engines.draw import uniform
from disagg.workers.engines.finite import NonFiniteError, check_finite
from disagg.workers.engines.logprobs import token_logprobs
from disagg.workers.engines.sampler import sample


def params(**fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]


def draws(logits: torch.Tensor, param: SamplingParams, number: int = 4000) -> list[int]:
    rows = logits.expand(number, -1)
    return [s.token_id for s in sample(rows, [param] * number, range(number))]


def frequencies(tokens: list[int], vocab_size: int) -> list[float]:
    return [tokens.count(token) / len(tokens) for token in range(vocab_size)]


def distance(left: list[float], right: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / 2


LOGITS = torch.tensor([[1.0, 3.0, -2.0, 2.0, 0.0]])


def test_greedy_takes_the_best() -> None:
    assert sample(LOGITS, [params()], [5]) == [SampledToken(1)]


def test_temperature_follows_the_softmax() -> None:
    for temperature in (0.5, 1.0, 2.0):
        expected = (LOGITS[0] / temperature).softmax(0).tolist()
        actual = frequencies(draws(LOGITS, params(temperature=temperature)), 5)
        assert distance(actual, expected) < 0.03
        # Control: another temperature's distribution would be noticed.
        assert distance(actual, (LOGITS[0] / (3 * temperature)).softmax(0).tolist()) > 0.03


def test_top_k_keeps_the_best_k() -> None:
    kept = LOGITS[0, [1, 3]].softmax(0).tolist()
    actual = frequencies(draws(LOGITS, params(temperature=1.0, top_k=2)), 5)
    assert distance(actual, [0, kept[0], 0, kept[1], 0]) < 0.03


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    best = LOGITS[0].softmax(0)
    just_two = float(best[1] + best[3])
    assert set(draws(LOGITS, params(temperature=1.0, top_p=just_two - 1e-6))) == {1, 3}
    assert set(draws(LOGITS, params(temperature=1.0, top_p=just_two + 1e-3))) == {0, 1, 3}
    assert set(draws(LOGITS, params(temperature=1.0, top_p=1e-9))) == {1}
    assert set(draws(LOGITS, params(temperature=1.0, top_p=1.0))) == {0, 1, 2, 3, 4}


def test_top_k_is_applied_before_top_p() -> None:
    # Of the two best, the first alone has 0.73: it reaches 0.7 only after the cut to two.
    assert set(draws(LOGITS, params(temperature=1.0, top_k=2, top_p=0.7))) == {1}
    assert set(draws(LOGITS, params(temperature=1.0, top_p=0.7))) == {1, 3}


def test_outcome_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(16, 50, generator=generator) * 3
    mixed = [
        params(temperature=0.0 if i % 3 == 0 else 0.8, top_k=i, top_p=0.9, seed=i)
        for i in range(16)
    ]
    positions = list(range(100, 116))
    together = sample(rows, mixed, positions)
    alone = [sample(rows[i : i + 1], [mixed[i]], [positions[i]])[0] for i in reversed(range(16))]
    assert together == alone[::-1]


@pytest.mark.parametrize(
    ("own", "beside", "number", "shift"),
    [
        ({}, {}, 1, 200.0),
        ({"top_k": 300}, {"temperature": 0.7, "top_k": 700}, 1, 0.0),
        ({"top_p": 0.5}, {"top_p": 0.9}, 15, 0.0),
    ],
    ids=["beside logits out of exp's range", "beside a longer top_k", "beside many"],
)
def test_no_rounding_depends_on_the_batch(
    own: dict[str, float],
    beside: dict[str, float],
    number: int,
    shift: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers at which two tokens meet, and a top_p that the heavier ones just reach."""
    row, other = torch.randn(2, 1, 5000, generator=torch.Generator().manual_seed(3)) * 3
    rows = torch.cat((row, *[other + shift] * number))
    mine, theirs = params(temperature=1.0, **own), params(**{"temperature": 1.0} | beside)
    weights = row[0].double().exp()
    if mine.top_k:
        weights[weights < weights.topk(mine.top_k).values[-1]] = 0
    ends = (weights.cumsum(0) / weights.sum())[weights > 0]
    best, ids = weights.topk(300)
    shares = (best.cumsum(0) / weights.sum()).tolist()
    for place in range(0, 290, 10):
        decides = float(ends[len(ends) * place // 300]) + 1e-13
        if mine.top_p < 1:
            mine, token = replace(mine, top_p=shares[place]), int(ids[place + 1])
            decides = float((weights[:token].sum() + weights[token] / 2) / weights.sum())
        monkeypatch.setattr(draw, "uniform", lambda *_, at=decides: at)
        (alone,) = draw.draw(rows[:1], [mine], [0])
        assert draw.draw(rows, [mine, *[theirs] * number], range(len(rows)))[0] == alone, place


def test_seed_and_position_both_matter() -> None:
    flat = torch.zeros(1, 1000)
    hot = params(temperature=1.0, seed=1)
    assert sample(flat, [hot], [7]) == sample(flat, [hot], [7])
    by_position = {sample(flat, [hot], [p])[0].token_id for p in range(20)}
    by_seed = {sample(flat, [params(temperature=1.0, seed=s)], [7])[0].token_id for s in range(20)}
    assert len(by_position) > 15
    assert len(by_seed) > 15


PINNED = 0.5287221880414554


def test_uniform_is_uniform_and_fixed() -> None:
    numbers = [uniform(seed, position) for seed in range(40) for position in range(100)]
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    # Pinned: a request that moves between releases or machines must go on unchanged.
    assert uniform(0, 0) == PINNED
    assert uniform(-(2**63), 2**40) != uniform(2**63, 2**40)


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    expected = LOGITS[0].log_softmax(0)
    cold = params(temperature=0.1, top_k=1, num_logprobs=3)
    (sampled,) = sample(LOGITS, [cold], [0])
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(float(expected[1]))
    assert [token for token, _ in sampled.logprobs.top] == [1, 3, 0]
    assert [value for _, value in sampled.logprobs.top] == pytest.approx(
        [float(expected[token]) for token in (1, 3, 0)]
    )
    (only,) = sample(LOGITS, [params(num_logprobs=0)], [0])
    assert only.logprobs is not None
    assert only.logprobs.top == ()
    (none,) = sample(LOGITS, [params()], [0])
    assert none.logprobs is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_comes_from_non_finite_logits(bad: float, temperature: float) -> None:
    rows = LOGITS.repeat(2, 1)
    rows[1, 2] = bad
    with pytest.raises(NonFiniteError):
        sample(rows, [params(temperature=temperature)] * 2, [0, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_finite_values_whose_sum_is_not(dtype: torch.dtype) -> None:
    """As many as a step of 16 tokens has in a model of 2,048."""
    values = torch.full((16, 2048), 30.0, dtype=dtype)
    assert dtype != torch.float16 or not values.sum().isfinite()
    check_finite("a hidden state", values)
    for bad in (math.nan, math.inf, -math.inf):
        values[3, 5] = bad
        with pytest.raises(NonFiniteError, match="a hidden state is not finite"):
            check_finite("a hidden state", values)


def test_bfloat16_logits() -> None:
    assert sample(LOGITS.bfloat16(), [params(num_logprobs=1)], [0])[0].token_id == 1


def kept(row: torch.Tensor, param: SamplingParams) -> set[int]:
    """Tokens that may be drawn, by the plain definition in double precision."""
    order = sorted(range(len(row)), key=lambda token: -float(row[token]))
    if param.min_p:
        # The product in single precision decides, as the weights are.
        best = float(row[order[0]])
        order = [
            t for t in order if math.exp((float(row[t]) - best) / param.temperature) >= param.min_p
        ]
    if param.top_k:
        order = [t for t in order if row[t] >= row[order[min(param.top_k, len(order)) - 1]]]
    weights = [math.exp((float(row[t]) - float(row[order[0]])) / param.temperature) for t in order]
    mass, number = 0.0, 0
    while number < len(order) and (number == 0 or mass < param.top_p * sum(weights)):
        mass += weights[number]
        number += 1
    return {t for t in order if row[t] >= row[order[number - 1]]}


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.01, 1.0, 5.0, 30.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 60),
    min_p=st.sampled_from([0.0, 0.0, 0.003, 0.4, 1.0]),
    num_spare=st.sampled_from([1, 4, 64]),
    rounded=st.booleans(),
)
def test_what_is_drawn_is_kept_by_the_plain_definition(
    seed: int,
    spread: float,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    num_spare: int,
    rounded: bool,
) -> None:
    """Equal logits, more of them than are looked at, limits above the vocabulary included."""
    row = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * spread
    if rounded:
        row = row.round()
    param = params(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "NUM_SPARE", num_spare)
        got = set(draws(row, param, 400))
    may = kept(row[0], param)
    weights = {t: math.exp(float(row[0, t] - row.max()) / temperature) for t in may}
    likely = {t for t, w in weights.items() if w > 0.1 * sum(weights.values())}
    # What ends within a rounding of a limit may end one token later.
    nearly = replace(param, top_p=min(1.0, top_p + 1e-4), min_p=min_p * (1 - 1e-4))
    assert got <= kept(row[0], nearly)
    assert got >= likely


@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.95])
@pytest.mark.parametrize("top_k", [0, 20])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_what_is_kept_is_drawn_by_its_weight(top_p: float, top_k: int, spread: float) -> None:
    """Draws that were refused before, and with numbers of their own, bend nothing."""
    row = torch.randn(1, 70, generator=torch.Generator().manual_seed(2)) * spread
    param = params(temperature=1.3, top_p=top_p, top_k=top_k)
    weights = (row[0] / 1.3).softmax(0)
    whole = [float(w) if t in kept(row[0], param) else 0.0 for t, w in enumerate(weights)]
    expected = [w / sum(whole) for w in whole]
    actual = frequencies(draws(row, param, 20_000), 70)
    assert distance(actual, expected) < 0.03
    if spread and sum(w > 0 for w in whole) > 5:  # control: the other limits' distribution
        other = [w / sum(weights.tolist()) for w in weights.tolist()]
        flat = [1 / 70] * 70
        assert distance(actual, flat) > 0.03
        assert top_p == 0.95 or distance(actual, other) > 0.03


def test_spare_tokens_change_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(8, 5000, generator=torch.Generator().manual_seed(4)).bfloat16() * 2
    mixed = [params(temperature=1.0, top_p=0.2 + i / 10, top_k=i * 300, seed=i) for i in range(8)]
    few = sample(rows, mixed, range(8))
    monkeypatch.setattr(draw, "NUM_SPARE", 5000)
    assert sample(rows, mixed, range(8)) == few


def test_a_temperature_next_to_nothing_is_greedy() -> None:
    rows = torch.randn(4, 100, generator=torch.Generator().manual_seed(4)) * 30
    best = sample(rows, [params()] * 4, range(4))
    for temperature in (1e-320, 1e-9, 2e-5):
        assert sample(rows, [params(temperature=temperature)] * 4, range(4)) == best


def test_a_token_of_no_weight_is_never_drawn() -> None:
    row = torch.full((1, 100), -1e4)
    row[0, 50] = 0
    for number in (0.0, 0.5, 1 - 2**-53):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draw, "uniform", lambda *_, number=number: number)
            assert sample(row, [params(temperature=1.0)], [0])[0].token_id == 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stop_token_comes_before_min_tokens(temperature: float) -> None:
    logits = torch.tensor([0.0, 9.0, 1.0, 8.0, 2.0, 0.0]).expand(9, -1)
    param = SamplingParams(
        max_tokens=9,
        temperature=temperature,
        stop_token_ids=(1, 3, 77),  # one is none of the model's
        min_tokens=4,
        num_prompt_tokens=10,
        num_logprobs=2,
        logit_bias=((1, 100.0),),
    )
    sampled = sample(logits, [param] * 9, range(10, 19))
    ends = [one.token_id in (1, 3) for one in sampled]
    assert ends == [False] * 4 + [True] * 5
    # Its log-probabilities are those of the model all the same.
    assert all(one.logprobs and [i for i, _ in one.logprobs.top] == [1, 3] for one in sampled)
    without = sample(logits, [replace(param, min_tokens=0)] * 9, range(10, 19))  # control
    assert all(one.token_id == 1 for one in without)
    mixed = sample(logits, [param, replace(param, min_tokens=0)] + [param] * 7, range(10, 19))
    assert [one.token_id in (1, 3) for one in mixed] == [False, True, False, False] + [True] * 5


def test_ranks_count_the_better_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 4.0, 4.0, 1.0]])
    tokens = torch.tensor([3, 3])
    found = token_logprobs(logits.clone(), tokens, [2, 0], with_ranks=True)
    assert [one.rank for one in found] == [1, 4]
    expected = logits.log_softmax(-1)
    assert [one.logprob for one in found] == pytest.approx(
        [float(expected[0, 3]), float(expected[1, 3])]
    )
    assert [len(one.top) for one in found] == [2, 0]
    assert [one.rank for one in token_logprobs(logits.clone(), tokens, [2, 0])] == [0, 0]
