"""Log-probabilities of prompts over HTTP and two workers: those of plain transformers, once."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch

from tests.checkpoints import reference_logits
from tests.process.conftest import EOS_PROMPT
from tests.process.harness import wait_until
from tests.process.served_model import (
    GAP_MIN,
    WINDOW,
    Expected,
    ServedModel,
    assert_exact,
    handed_over,
    is_reported,
)

pytestmark = pytest.mark.timeout(600)

NUM_BEST = 2
TOLERANCE = 1e-4
FAMILIES = (
    "gemma3",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("deepseek_v3", "gpt_oss", "llama4", "nemotron_h", "gemma3n", "cohere2")
    ),
)


def ask(served: ServedModel, expected: Expected, request_id: str = "", **more: Any) -> Any:
    extra = {"prompt_logprobs": NUM_BEST} | more
    return served.ask(expected, request_id, extra_body=extra)


def shown(completion: Any) -> list[dict[str, Any] | None]:
    found: list[dict[str, Any] | None] = completion.choices[0].model_extra["prompt_logprobs"]
    return found


def _is_reported(served: ServedModel, request_id: str) -> bool:
    return is_reported(served.cluster.record(request_id))


def differs(served: ServedModel, prompt: Sequence[int], found: Sequence[Any]) -> str:
    """Where they are not the reference's; "" if they are."""
    if len(found) != len(prompt) or found[0] is not None:
        return f"{len(found)} of {len(prompt)}"
    rows = reference_logits(served.cluster.model_dir, prompt).log_softmax(-1)
    for at, (row, token, entry) in enumerate(zip(rows, prompt[1:], found[1:], strict=False), 1):
        own = entry[str(token)]
        rank = 1 + int((row > row[token]).sum())
        if abs(own["logprob"] - float(row[token])) > TOLERANCE or abs(own["rank"] - rank) > 2:
            return f"position {at}: {own}, not {float(row[token])}, rank {rank}"
        best = sorted((one["logprob"] for one in entry.values()), reverse=True)[:NUM_BEST]
        if best != pytest.approx(row.topk(NUM_BEST).values.tolist(), abs=TOLERANCE):
            return f"position {at}: the best are {best}"
    return ""


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_of_a_prompt_that_is_handed_over(served: ServedModel) -> None:
    for length in (1, 2, 17, WINDOW + 1, 97, 230):
        expected = served.prompt(length)
        for number in range(2):
            request_id = served.new_id()
            completion = ask(served, expected, request_id)
            assert_exact(completion, expected)
            assert differs(served, expected.prompt, shown(completion)) == ""
            reported = partial(_is_reported, served, request_id)
            wait_until(reported, "the prefill's report")
            generation = handed_over(served.cluster.record(request_id))
            assert generation["hit_tokens"] == 0, f"time {number + 1}"
            assert generation["computed_tokens"] == length
    wrong = [expected.prompt[1], *expected.prompt[1:]]  # control: another prompt's
    assert differs(served, wrong, shown(completion))
    assert served.serve(expected)["hit_tokens"] > 0  # control: without them it is found


def test_a_loglikelihood_as_lm_eval_asks_for_it(gemma3: ServedModel) -> None:
    expected = gemma3.prompt(120)
    rows = reference_logits(gemma3.cluster.model_dir, expected.prompt).log_softmax(-1)
    plain = [float(row[token]) for row, token in zip(rows, expected.prompt[1:], strict=False)]
    for max_tokens in (0, 1):
        body = gemma3.body(expected, echo=True, max_tokens=max_tokens)
        choice = gemma3.cluster.client.completions.create(**body).choices[0]
        assert choice.logprobs is not None
        values = choice.logprobs.token_logprobs
        assert values is not None
        assert values[0] is None
        assert values[1:120] == pytest.approx(plain, abs=TOLERANCE)
        assert len(values) == 120 + max_tokens
        assert choice.text == "".join(choice.logprobs.tokens or [])
        assert choice.finish_reason == "length"


class Held:
    """A scored request whose prefill stands still after so many of its steps."""

    def __init__(self, served: ServedModel, length: int, num_steps: int) -> None:
        self.served, self.expected = served, served.prompt(length, 20)
        self.name = served.new_id()
        told = served.cluster.tell("p0", "hold steps")
        served.cluster.tell("p0", f"pass steps {num_steps}")
        self._answer: Future[Any] = served._threads.submit(ask, served, self.expected, self.name)
        served.cluster.wait_told("p0", "held steps", told)

    def check(self) -> list[dict[str, Any]]:
        """The answer is whole; the request's generations."""
        completion = self._answer.result(120)
        assert_exact(completion, self.expected)
        assert differs(self.served, self.expected.prompt, shown(completion)) == ""
        generations: list[dict[str, Any]] = self.served.cluster.record(self.name)["generations"]
        return generations


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_prefill_worker_that_dies_on_the_way(gemma3: ServedModel, num_steps: int) -> None:
    """With none, one or two of three chunks said."""
    held = Held(gemma3, 230, num_steps)
    gemma3.cluster.workers["p0"].kill()
    first, second = held.check()
    assert first["cause"].startswith(("worker_lost", "peer_lost"))  # whoever notices first
    assert second["decode"]["worker_id"] == "d0"
    gemma3.cluster.wait_quiescent()


def test_a_decode_worker_that_dies_after_the_first_tokens(gemma3: ServedModel) -> None:
    """They were delivered: who goes on computes none, and may use what is cached."""
    cluster, expected = gemma3.cluster, gemma3.prompt(150, 30)
    told = cluster.tell("d0", "hold steps")
    cluster.tell("d0", "pass steps 4")
    answer = gemma3._threads.submit(ask, gemma3, expected, "scored-moved")
    cluster.wait_told("d0", "held steps", told)
    wait_until(lambda: cluster.record("scored-moved")["num_tokens"] == 5, "five tokens")
    cluster.workers["d0"].kill()
    completion = answer.result(120)
    assert_exact(completion, expected)
    assert differs(gemma3, expected.prompt, shown(completion)) == ""
    wait_until(lambda: is_reported(cluster.record("scored-moved")), "the prefill's report")
    first, second = cluster.record("scored-moved")["generations"]
    assert (first["hit_tokens"], second["hit_tokens"]) == (0, 144)
    cluster.wait_quiescent()


def test_min_tokens_and_stop_tokens_over_a_hand_over(gemma3: ServedModel) -> None:
    """The first token would end it; masked until then, it goes on as the reference does."""
    num_tokens, min_tokens = 12, 6
    length = len(EOS_PROMPT)
    plain = gemma3.expect(EOS_PROMPT, 2)
    assert plain.token_ids[0] == gemma3.eos_id

    def adjust(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        masked = logits.clone()
        if len(tokens) - length < min_tokens:
            masked[[gemma3.eos_id, 1, 2]] = -torch.inf
        return masked

    expected = gemma3.expect(EOS_PROMPT, num_tokens, adjust)
    assert expected.min_gap > GAP_MIN
    own = list(expected.token_ids)
    end = next(n for n in range(min_tokens, num_tokens) if own[n] not in own[:min_tokens])
    stop = own[end]
    assert gemma3.eos_id not in own[:end]
    body = gemma3.body(expected, max_tokens=num_tokens)
    fields = {"min_tokens": min_tokens, "stop_token_ids": [stop]}
    completion = gemma3.cluster.client.completions.create(**body, extra_body=fields)
    (choice,) = completion.choices
    assert choice.finish_reason == "stop"
    assert choice.text == "".join(expected.texts[:end])
    assert completion.usage is not None
    assert completion.usage.completion_tokens == end + 1
    without = gemma3.cluster.client.completions.create(**body)  # control
    assert without.usage is not None
    assert without.usage.completion_tokens == 1
