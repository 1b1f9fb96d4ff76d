"""lm-eval over a local task: it scores what we serve as we serve it."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.accuracy.evaluate import Evaluation, EvaluationError, evaluate, of_server
from benchmarks.accuracy.task import CHOOSE, GENERATE, Item, write_tasks
from tests.checkpoints import reference_logits
from tests.clients.environments import environment_of
from tests.clients.served import MODEL, Served

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1_800)]

NUM_ITEMS, NUM_CHOICES, MAX_TOKENS = 6, 3, 8
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "after", "some"]


def score(served: Served, folder: Path, items: list[Item]) -> dict[str, Evaluation]:
    python = environment_of("lm_eval") / "bin" / "python"
    write_tasks(folder, items, MAX_TOKENS)
    model_args = of_server(served.url, MODEL, served.checkpoint, num_concurrent=2)
    return evaluate(
        python, folder, (GENERATE, CHOOSE), "local-completions", model_args, api_key=served.key
    )


def draw(served: Served) -> list[Item]:
    """Items whose right answer is what our own request gets; their other choices are words."""
    rng, items = Random(3), []
    for number in range(NUM_ITEMS):
        prompt = " ".join(rng.choices(WORDS, k=30))
        answer = served.complete(prompt, MAX_TOKENS, stop=["\n", "<eos>"])["text"].strip()
        wrong = [" ".join(rng.choices(WORDS, k=3)) for _ in range(NUM_CHOICES - 1)]
        choices = [*wrong[:1], answer, *wrong[1:]] if number % 2 else [answer, *wrong]
        items.append(Item(prompt, answer, tuple(choices)))
    return items


def likelihood(tokenizer: Any, checkpoint: Path, prompt: str, choice: str) -> float:
    """What plain transformers gives to a choice behind a prompt."""
    before, whole = (tokenizer.encode(text).ids for text in (prompt, f"{prompt} {choice}"))
    assert whole[: len(before)] == before
    logprobs = reference_logits(checkpoint, whole).log_softmax(-1)
    return sum(float(logprobs[at - 1, whole[at]]) for at in range(len(before), len(whole)))


def test_a_local_task(served: Served, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(served.checkpoint / "tokenizer.json"))
    items = draw(served)
    found = score(served, tmp_path / "tasks", items)
    assert found[GENERATE].results == tuple(item.answer for item in items)
    assert found[GENERATE].score == 1.0
    for item, likelihoods in zip(items, found[CHOOSE].results, strict=True):
        expected = [
            likelihood(tokenizer, served.checkpoint, item.prompt, choice) for choice in item.choices
        ]
        assert likelihoods == pytest.approx(expected, abs=1e-2)
        best = max(range(NUM_CHOICES), key=lambda index: expected[index])
        assert found[CHOOSE].right[items.index(item)] == (item.choices[best] == item.answer)

    # Control: the score is of the answers, not of having answered.
    others = [replace(item, answer=item.choices[-1]) for item in items]
    assert score(served, tmp_path / "others", others)[GENERATE].score == 0.0


def test_it_notices_a_wrong_key(served: Served, tmp_path: Path) -> None:
    """Control: a refused request ends it with an error."""
    items = [Item("the cat", "sat", ("sat", "ran"))]
    with pytest.raises(EvaluationError, match="401"):
        score(replace(served, key="sk-wrong"), tmp_path / "tasks", items)
