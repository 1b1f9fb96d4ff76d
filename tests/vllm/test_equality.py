"""vLLM's runner under our scheduler equals plain transformers: tokens exactly, logprobs to 1e-4."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from disagg.messages.sampling import SamplingParams
from disagg.workers.engines.native.native_engine import NativeEngine
from tests.checkpoints import reference_generate
from tests.vllm.conftest import WINDOW, Loaded
from tests.vllm.engines import BLOCK_TOKENS
from tests.vllm.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FAMILIES = ("gemma3", "mistral", "qwen3", "gpt_oss", "llama", "gemma2", "gemma4")
LENGTHS = (1, 31, 32, 33, WINDOW, 2 * BLOCK_TOKENS + 1, 7 * WINDOW + 3)
"""Around blocks of 32 and a window of 40."""
NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, num_logprobs=0)
GAP_MIN = 1e-3
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, load: Callable[[str], Loaded]) -> Loaded:
    return load(request.param)


@pytest.fixture(scope="module")
def expected(loaded: Loaded) -> dict[str, tuple[list[int], list[int], list[float]]]:
    """Prompts that the reference is clear about, with its tokens and their logprobs."""
    found = {}
    for length in LENGTHS:
        for attempt in range(50):
            rng = random.Random(f"{length}/{attempt}")
            prompt = [rng.randrange(7, 320) for _ in range(length)]
            tokens, logprobs, gap = reference_generate(loaded.directory, prompt, NUM_TOKENS)
            if gap > GAP_MIN:
                found[str(length)] = (prompt, tokens, logprobs)
                break
    assert len(found) == len(LENGTHS)
    return found


Expected = dict[str, tuple[list[int], list[int], list[float]]]


def check(serving: Serving, expected: Expected, suffix: str = "") -> None:
    for name, (_, tokens, logprobs) in expected.items():
        assert serving.tokens(name + suffix) == tokens
        assert serving.logprobs(name + suffix) == pytest.approx(logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("max_step_tokens", [37, 512])
def test_packed_chunks(loaded: Loaded, expected: Expected, max_step_tokens: int) -> None:
    serving = Serving(loaded.engine, max_step_tokens)
    for name, (prompt, _, _) in expected.items():
        serving.submit(name, prompt, GREEDY)
    serving.run()
    check(serving, expected)
    if max_step_tokens < 512:
        assert any(len({len(part.token_ids) for part in s.slices}) > 1 for s in serving.steps)


def test_prefix_hits(loaded: Loaded, expected: Expected) -> None:
    serving = Serving(loaded.engine)
    for suffix in ("", "-again"):
        for name, (prompt, _, _) in expected.items():
            serving.submit(name + suffix, prompt, GREEDY)
        serving.run()
        check(serving, expected, suffix)
    long = str(LENGTHS[-1])
    assert serving.first_starts([long, f"{long}-again"]) == [0, 7 * WINDOW // 32 * 32]


def test_preempted_and_resumed(loaded: Loaded, expected: Expected) -> None:
    engine = loaded.engine
    name = str(WINDOW + 20)
    prompt = expected[str(LENGTHS[-1])][0][: WINDOW + 20]
    tokens, _, gap = reference_generate(loaded.directory, prompt, NUM_TOKENS)
    assert gap > GAP_MIN
    preemptions = 0
    for per_group in (4, 6, 8):
        num_blocks = per_group * len(engine.layout.groups) + 1
        serving = Serving(engine, num_blocks=num_blocks)
        for number in range(4):
            serving.submit(f"{name}-{number}", [prompt[number], *prompt[1:]], GREEDY)
        serving.run()
        assert serving.tokens(f"{name}-0") == tokens
        preemptions += serving.core.batcher.num_preemptions
        for number in range(4):
            alone = Serving(engine)
            alone.submit("alone", [prompt[number], *prompt[1:]], GREEDY)
            alone.run()
            assert alone.tokens("alone") == serving.tokens(f"{name}-{number}")
    assert preemptions > 0


def test_sampled_as_the_native_engine(loaded: Loaded, expected: Expected) -> None:
    native = NativeEngine(loaded.directory, num_blocks=300, block_tokens=BLOCK_TOKENS)
    assert native.fingerprint == loaded.engine.fingerprint
    assert native.page_format != loaded.engine.page_format
    # Bounded: in the tail of equal, tiny probabilities the last bits of a sum would decide.
    draws = [
        SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95, seed=1, num_logprobs=2),
        SamplingParams(max_tokens=20, temperature=2.0, top_k=50, seed=2),
        SamplingParams(max_tokens=20, temperature=0.7, top_p=0.98, seed=3),
        SamplingParams(
            max_tokens=20,
            temperature=1.0,
            top_k=40,
            min_p=0.01,
            seed=4,
            presence_penalty=0.4,
            frequency_penalty=0.3,
            repetition_penalty=1.2,
            logit_bias=((40, 3.0), (60, -5.0)),
            num_logprobs=3,
        ),
    ]
    answers = []
    for engine, max_step_tokens in ((loaded.engine, 64), (native, 512)):
        serving = Serving(engine, max_step_tokens)
        for name, (prompt, _, _) in expected.items():
            for number, sampling in enumerate(draws):
                told = replace(sampling, num_prompt_tokens=len(prompt))
                serving.submit(f"{name}-{number}", prompt, told)
        serving.run()
        answers.append({name: serving.tokens(name) for name in serving.samples})
    assert answers[0] == answers[1]
    name, (prompt, tokens, _) = next(iter(expected.items()))
    assert len({tuple(answer[: len(tokens)]) for answer in answers[0].values()}) > len(expected)
    other = Serving(loaded.engine)  # control: another seed draws otherwise
    other.submit(name, prompt, replace(draws[1], seed=99))
    other.run()
    assert other.tokens(name) != answers[0][f"{name}-1"]
