"""Log-probabilities of prompts from vLLM's runner: those of plain transformers to 1e-4."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from disagg.messages.sampling import TokenLogprobs
from disagg.workers.engines import logprobs
from tests.checkpoints import reference_logits
from tests.unit.workers.engines.serving import GREEDY, core_over, serve
from tests.vllm.conftest import WINDOW, Loaded

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FAMILIES = ("gemma3", "mistral", "qwen3", "gpt_oss", "llama", "gemma2", "gemma4")
LENGTHS = (1, 2, 33, WINDOW, 3 * WINDOW + 5)
NUM_BEST, TOLERANCE = 3, 1e-4
SCORED = replace(GREEDY, num_prompt_logprobs=NUM_BEST)


@pytest.mark.parametrize("steps_max", [1, 2])
@pytest.mark.parametrize("max_step_tokens", [37, 512])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_the_plain_forward(
    load: Callable[[str], Loaded],
    family: str,
    max_step_tokens: int,
    steps_max: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In chunks, beside each other, a few rows at a time, in spite of what is cached."""
    monkeypatch.setattr(logprobs, "LOGITS_BYTES_MAX", 7 * 4 * 320)
    loaded = load(family)
    prompts = [[7 + (11 * n * n + 3 * length) % 300 for n in range(length)] for length in LENGTHS]
    core = core_over(loaded.engine, max_step_tokens, steps_max)
    hits: list[int] = []
    scores: list[list[TokenLogprobs]] = []
    for _ in range(2):
        serve(core, loaded.engine, prompts, SCORED, hits=hits, scores=scores)
        assert hits == [0] * len(prompts)
        for prompt, own in zip(prompts, scores, strict=True):
            assert largest_difference(loaded, prompt, own) < TOLERANCE
    other = [*prompts[-1][:-1], prompts[-1][0]]  # control: another prompt's
    assert largest_difference(loaded, other, scores[-1]) > 10 * TOLERANCE


def largest_difference(loaded: Loaded, prompt: list[int], scores: list[TokenLogprobs]) -> float:
    """Of all numbers; infinite where a rank is another one."""
    assert len(scores) == len(prompt) - 1
    rows = reference_logits(loaded.directory, prompt).log_softmax(-1)
    largest = 0.0
    for row, token, one in zip(rows, prompt[1:], scores, strict=False):
        best = row.topk(NUM_BEST).values.tolist()
        pairs = zip(
            [one.logprob, *(v for _, v in one.top)], [float(row[token]), *best], strict=True
        )
        largest = max(largest, *(abs(own - plain) for own, plain in pairs))
        if abs(one.rank - 1 - int((row > row[token]).sum())) > 2:  # equal ones may change places
            return math.inf
    return largest
