"""Many requests of every kind over a pool that is too small: each answer is that of a quiet run."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.messages.session import Cancel
from tests.checkpoints import reference_generate
from tests.vllm.conftest import WINDOW, Loaded
from tests.vllm.engines import make_vllm
from tests.vllm.families import make_family
from tests.vllm.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_TOKENS = 40
KINDS = (
    SamplingParams(NUM_TOKENS, num_logprobs=0),
    SamplingParams(NUM_TOKENS, temperature=1.0, top_p=0.95, seed=1, num_logprobs=3),
    SamplingParams(
        NUM_TOKENS,
        temperature=0.8,
        top_k=50,
        seed=2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.3,
        num_logprobs=1,
    ),
    SamplingParams(NUM_TOKENS, logit_bias=((30, 6.0), (50, -9.0)), num_logprobs=1),
    SamplingParams(NUM_TOKENS, temperature=1.5, min_p=0.02, seed=3),
)
NUM_REQUESTS = 15
"""More than the 8 sequences of a step."""


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    made = {}
    common = [(7 * i) % 301 + 8 for i in range(70)]
    for number in range(NUM_REQUESTS):
        rng = random.Random(number)
        length = rng.choice((3, 40, 64, 90, 100))
        prompt = [*common[: length * (number % 2)], *(rng.randrange(7, 320) for _ in range(length))]
        params = replace(KINDS[number % len(KINDS)], num_prompt_tokens=len(prompt))
        made[str(number)] = prompt, params
    return made


def same(one: list[SampledToken], other: list[SampledToken]) -> None:
    assert [sample.token_id for sample in one] == [sample.token_id for sample in other]
    for left, right in zip(one, other, strict=True):
        assert (left.logprobs is None) == (right.logprobs is None)
        if left.logprobs is not None and right.logprobs is not None:
            assert left.logprobs.logprob == pytest.approx(right.logprobs.logprob, abs=1e-4)
            values = [[value for _, value in each.top] for each in (left.logprobs, right.logprobs)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "nemotron_h"])
def test_answers_do_not_depend_on_it(load: Callable[[str], Loaded], family: str) -> None:
    engine = load(family).engine
    alone = Serving(engine)
    for name, (prompt, params) in requests().items():
        alone.submit(name, prompt, params)
        alone.run()
    assert len({tuple(alone.tokens(name)) for name in requests()}) == NUM_REQUESTS
    num_preemptions = num_cancelled = 0
    for per_group, steps_max in ((7, 1), (8, 2)):
        num_blocks = per_group * len(engine.layout.groups) + 1
        serving = Serving(engine, 48, num_blocks=num_blocks, steps_max=steps_max)
        cancelled: set[str] = set()
        for name, (prompt, params) in requests().items():
            serving.submit(name, prompt, params)
        while serving.core.sequences or serving.launched:
            assert serving.step() == ""
            last = serving.steps[-1]
            if last.step_id % 7 == 3:  # in the middle of its prompt, or of its answer
                key = last.slices[-1].key
                cancelled.add(key.request_id)
                serving.core.on_router_message(0, Cancel(key, "test"))
        for name in requests():
            if name not in cancelled:
                same(serving.samples[name], alone.samples[name])
        num_preemptions += serving.core.batcher.num_preemptions
        num_cancelled += sum(not serving.samples[name] for name in cancelled)
        serving.submit("last", [9], SamplingParams(1))
        serving.run()
        assert engine.batch.names == {"/last/1"}
        assert engine.runner.num_requests == engine.runner.num_rows == 1
        assert engine.runner.num_histories == 0
    assert num_preemptions
    assert num_cancelled, "some in mid-prefill"


MAX_MODEL_TOKENS, MAX_STEP_TOKENS = 128, 64
GAP_MIN = 1e-3


def clear_prompt(directory: Path, length: int, num_tokens: int) -> tuple[list[int], list[int]]:
    """A prompt that the reference is clear about, with the tokens that follow."""
    for attempt in range(50):
        rng = random.Random(f"{length}/{attempt}")
        prompt = [rng.randrange(7, 320) for _ in range(length)]
        tokens, _, gap = reference_generate(directory, prompt, num_tokens)
        if gap > GAP_MIN:
            return prompt, tokens
    raise AssertionError(f"no clear prompt of {length} tokens")


def test_prompts_and_steps_at_the_limits(tmp_path: Path) -> None:
    """The last token that fits, and steps that are exactly full."""
    make_family(tmp_path, "gemma3", WINDOW)
    limits = {"max_model_tokens": MAX_MODEL_TOKENS, "max_step_tokens": MAX_STEP_TOKENS}
    engine = make_vllm(tmp_path, 100, **limits)
    assert engine.max_model_tokens == MAX_MODEL_TOKENS
    serving = Serving(engine, MAX_STEP_TOKENS, max_model_tokens=MAX_MODEL_TOKENS)
    cases = {}
    for length in (1, MAX_STEP_TOKENS - 1, MAX_STEP_TOKENS, 96, MAX_MODEL_TOKENS - 1):
        prompt, begun = clear_prompt(tmp_path, length, min(MAX_MODEL_TOKENS - length, 32))
        cases[str(length)] = begun, MAX_MODEL_TOKENS - length
        serving.submit(str(length), prompt, SamplingParams(MAX_MODEL_TOKENS - length))
    serving.submit("beyond", [9] * MAX_MODEL_TOKENS, SamplingParams(1))
    serving.run()
    assert serving.tokens("beyond") == []
    sizes = [sum(len(part.token_ids) for part in step.slices) for step in serving.steps]
    assert max(sizes) == MAX_STEP_TOKENS
    for name, (begun, num_tokens) in cases.items():
        assert len(serving.tokens(name)) == num_tokens
        assert serving.tokens(name)[:32] == begun
    last = {part.start + len(part.token_ids) for step in serving.steps for part in step.slices}
    assert max(last) == MAX_MODEL_TOKENS - 1
