"""Tokens of a handed-over request are those of plain transformers, logprobs to 1e-4."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from tests.process.conftest import EOS_PROMPT
from tests.process.harness import MODEL, wait_until
from tests.process.served_model import (
    BLOCK_TOKENS,
    GAP_MIN,
    WINDOW,
    ServedModel,
    WrongAnswerError,
    assert_exact,
    handed_over,
    is_reported,
    pulled_bytes,
)

pytestmark = pytest.mark.timeout(600)

EVERYWHERE = ("gemma3", "mistral", "qwen3", "gpt_oss", "gemma2", "deepseek_v3")
SLOW = (
    "cohere2",
    "deepseek_v2",
    "gemma3n",
    "gemma4",
    "glm4_moe_lite",
    "llama",
    "llama4",
    "qwen3_window",
)
FAMILIES = (*EVERYWHERE, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
STATES = ("nemotron_h",)
SLOW_STATES = ("bamba", "falcon_h1", "granite_hybrid", "jamba", "lfm2", "qwen3_5", "qwen3_next")
WITH_STATES = (*STATES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_STATES))
MOVED_FAST = ("nemotron_h", "deepseek_v3", "llama4")
MOVED = (
    *MOVED_FAST,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (*EVERYWHERE, *SLOW, *STATES, *SLOW_STATES)
        if name not in MOVED_FAST
    ),
)

LENGTHS = (1, 15, 16, 17, WINDOW - 1, WINDOW, WINDOW + 1, 47, 48, 49, 2 * WINDOW, 7 * WINDOW + 3)
"""Around blocks of 16 and a window of 32; more than one chunk of 96."""
NUM_AT_ONCE = 24


def hits(generation: dict[str, Any]) -> int:
    """Blocks of full attention that the decode worker had already."""
    maps = [g["block_map"] for g in generation["transfer"]["groups"] if not g["window_tokens"]]
    return min(block_map.count("h") for block_map in maps)


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_STATES], indirect=True)
def test_around_blocks_and_windows(served: ServedModel) -> None:
    for length in LENGTHS:
        generation = served.serve(served.prompt(length))
        assert generation["hit_tokens"] == 0
        assert generation["computed_tokens"] == length


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_with_prefix_hits_on_both_sides(served: ServedModel) -> None:
    first = served.prompt(150)
    served.serve(first)
    again = served.serve(first)
    assert again["hit_tokens"] == 144
    shared = served.serve(served.prompt(171, start=first.prompt[:130]))
    assert shared["hit_tokens"] == 128


@pytest.mark.parametrize("family", WITH_STATES, indirect=True)
def test_states_are_found_where_chunks_were_made_to_end(served: ServedModel) -> None:
    first = served.prompt(150)
    generation = served.serve(first)
    assert pulled_bytes(generation) > 0
    assert served.serve(first)["hit_tokens"] == 144
    # No chunk had ended at 128; where a prompt leaves a known prefix one does.
    for salt, hit_tokens in (("second", 96), ("third", 128)):
        shared = served.prompt(171, start=first.prompt[:130], salt=salt)
        assert served.serve(shared)["hit_tokens"] == hit_tokens


@pytest.mark.parametrize("family", [*EVERYWHERE, *STATES], indirect=True)
def test_many_at_once(served: ServedModel) -> None:
    common = served.prompt(70).prompt
    several = [
        served.prompt(5 + 9 * n, 8) if n % 3 else served.prompt(75 + n, 8, start=common)
        for n in range(NUM_AT_ONCE)
    ]
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        generations = list(threads.map(served.serve, several))
    assert len({generation["generation"] for generation in generations}) == NUM_AT_ONCE


@pytest.mark.parametrize("family", MOVED, indirect=True)
def test_moved_in_mid_decode(served: ServedModel) -> None:
    """The decode worker dies: the prefill worker goes on from what it has of the prompt."""
    cluster, expected = served.cluster, served.prompt(150, 30)
    told = cluster.tell("d0", "hold steps")
    cluster.tell("d0", "pass steps 4")
    answer = served.ask_later(expected, "moved")
    cluster.wait_told("d0", "held steps", told)
    wait_until(lambda: cluster.record("moved")["num_tokens"] == 5, "five tokens")
    cluster.workers["d0"].kill()
    assert_exact(answer.result(60), expected)
    wait_until(lambda: is_reported(cluster.record("moved")), "the prefill's report")
    first, second = cluster.record("moved")["generations"]
    assert first["cause"].startswith("worker_lost")
    assert (first["num_tokens"], second["num_tokens"]) == (5, 25)
    assert second["decode"]["worker_id"] == "p0"
    assert second["hit_tokens"] == 144
    cluster.wait_quiescent()


def test_hits_on_the_prefill_side_only(gemma3: ServedModel) -> None:
    expected = gemma3.prompt(150)
    gemma3.serve(expected)
    gemma3.cluster.tell("d0", "forget")
    gemma3.cluster.tell("d0", "poison")
    generation = gemma3.serve(expected)
    assert generation["hit_tokens"] == 144
    assert hits(generation) == 0


def test_hits_on_the_decode_side_only(gemma3: ServedModel) -> None:
    expected = gemma3.prompt(150)
    gemma3.serve(expected)
    gemma3.cluster.tell("p0", "forget")
    gemma3.cluster.tell("p0", "poison")
    generation = gemma3.serve(expected)
    assert generation["hit_tokens"] == 0
    assert hits(generation) == 144 // BLOCK_TOKENS


def test_a_second_turn_whose_history_lies_on_the_decode_worker(gemma3: ServedModel) -> None:
    first = gemma3.prompt(100, 40)
    gemma3.serve(first)
    second = gemma3.prompt(len(first.whole) + 40, start=first.whole)
    generation = gemma3.serve(second)
    # The prefill worker never saw the answer; the decode worker has the KV of all but its last
    # token.
    assert generation["hit_tokens"] == 96
    assert hits(generation) == (len(first.whole) - 1) // BLOCK_TOKENS


def test_an_answer_longer_than_the_window(gemma3: ServedModel) -> None:
    """Decoding leaves the pulled window behind: own blocks take its place."""
    gemma3.serve(gemma3.prompt(150, WINDOW + 20))


def test_the_first_token_comes_from_the_prefill_worker(gemma3: ServedModel) -> None:
    """It is delivered, logprobs included, while nothing has been pulled yet."""
    expected = gemma3.prompt(150)
    held = gemma3.cluster.tell("d0", "hold reads")
    stream = gemma3.cluster.client.completions.create(
        **gemma3.body(expected), stream=True, extra_headers={"X-Request-Id": "first"}
    )
    chunks = iter(stream)
    first = next(chunks).choices[0]
    gemma3.cluster.wait_told("d0", "held reads", held)
    assert not gemma3.cluster.record("first")["generations"][0]["transfer"]
    assert first.text == expected.texts[0]
    assert first.logprobs is not None
    assert first.logprobs.token_logprobs == pytest.approx([expected.logprobs[0]], abs=1e-4)
    gemma3.cluster.tell("d0", "pass reads")
    rest = [chunk.choices[0].text for chunk in chunks]
    assert first.text + "".join(rest) == "".join(expected.texts)
    handed_over(gemma3.cluster.record("first"))


def test_one_token_needs_no_pull(gemma3: ServedModel) -> None:
    expected = gemma3.prompt(150, 1)
    before = gemma3.cluster.counts("d0")["steps"]
    assert_exact(gemma3.ask(expected, "one"), expected)
    (generation,) = gemma3.cluster.record("one")["generations"]
    assert not generation["local"]
    assert generation["transfer"] is None
    assert gemma3.cluster.counts("d0")["steps"] == before


def test_end_of_sequence_as_first_token(gemma3: ServedModel) -> None:
    expected = gemma3.expect(EOS_PROMPT, 2)
    assert expected.token_ids[0] == gemma3.eos_id
    assert expected.min_gap > 1e-3
    completion = gemma3.ask(expected, "eos", max_tokens=20)
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].text == ""
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 1
    (generation,) = gemma3.cluster.record("eos")["generations"]
    assert not generation["local"]
    assert generation["transfer"] is None
    # Control: the same prompt goes on when that token does not end it.
    ignoring = gemma3.ask(expected, "eos-ignored", extra_body={"ignore_eos": True})
    assert_exact(ignoring, expected)


def test_prefill_and_decode_on_one_worker(gemma3: ServedModel) -> None:
    """A worker of role both serves alone: nothing is leased, nothing moves, the same tokens."""
    cluster = gemma3.cluster
    cluster.spawn("b0", "both")
    try:
        cluster.wait_ready("b0")
        cluster.tell("b0", "poison")
        for length in (1, WINDOW, 150):
            gemma3.wait_idle()  # among equals the first by name is chosen, for both parts
            expected = gemma3.prompt(length)
            assert_exact(gemma3.ask(expected, f"alone-{length}"), expected)
            (generation,) = cluster.record(f"alone-{length}")["generations"]
            assert generation["local"]
            assert generation["decode"]["worker_id"] == "b0"
            assert generation["transfer"] is None
        assert "transfers_committed" not in cluster.counters("b0")
        cluster.wait_quiescent()
    finally:
        cluster.workers.pop("b0").end()
        wait_until(lambda: len(cluster.known()) == 2, "the router to forget b0")


def test_penalties_and_bias_over_a_hand_over(gemma3: ServedModel) -> None:
    """By transformers' own processor and OpenAI's formula, before and after the hand-over."""
    length, num_tokens = 60, 24
    repetition = RepetitionPenaltyLogitsProcessor(1.3)
    penalties = {"presence_penalty": 0.6, "frequency_penalty": 0.4}

    def adjust(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        biased = logits.clone()
        biased[70] += 3
        seen = torch.bincount(torch.tensor([*tokens[length:], 0]), minlength=len(logits))
        seen[0] -= 1
        result: torch.Tensor = repetition(torch.tensor([tokens]), biased[None])[0]
        return result - 0.4 * seen - 0.6 * (seen > 0)

    for attempt in range(20):
        prompt = gemma3.prompt(length, 1, salt=f"penalties-{attempt}").prompt
        expected = gemma3.expect(prompt, num_tokens, adjust)
        if expected.min_gap > GAP_MIN and gemma3.eos_id not in expected.token_ids:
            break
    assert expected.min_gap > GAP_MIN
    more: dict[str, Any] = penalties | {"logit_bias": {"70": 3}}
    completion = gemma3.ask(expected, extra_body={"repetition_penalty": 1.3}, **more)
    assert_exact(completion, expected)
    with pytest.raises(WrongAnswerError):  # control: they matter for this prompt
        assert_exact(gemma3.ask(expected), expected)


def test_chat_streams_the_same_tokens(gemma3: ServedModel) -> None:
    messages = [{"role": "user", "content": "the sun and the rain, and the wind. " * 4}]
    ids = gemma3.template(messages)
    assert len(ids) > 2 * WINDOW
    expected = gemma3.expect(ids, 12)
    assert expected.min_gap > 1e-3
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
    }
    stream: Any = gemma3.cluster.client.chat.completions.create(
        **body, stream=True, extra_headers={"X-Request-Id": "chat"}
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(texts) == "".join(expected.texts)
    assert pulled_bytes(handed_over(gemma3.cluster.record("chat"))) > 0


def test_the_comparison_sees_a_difference(gemma3: ServedModel) -> None:
    """Control: another token, or a logprob that is off by twice the tolerance, fails."""
    expected = gemma3.prompt(33)
    completion = gemma3.ask(expected)
    assert_exact(completion, expected)
    off = (*expected.logprobs[:-1], expected.logprobs[-1] + 2e-4)
    other = (*expected.texts[:-1], expected.texts[-1] + "x")
    for wrong in (replace(expected, logprobs=off), replace(expected, texts=other)):
        with pytest.raises(WrongAnswerError):
            assert_exact(completion, wrong)
