"""Grammars in the sampler: rows with and without one, and what their tokens depend on."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from disagg.grammar.compiler import GrammarCompiler
from disagg.grammar.json_grammars import json_grammar
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SampledToken, SamplingParams
from disagg.scheduling.step import SequenceSlice
from disagg.workers.engines.sampler import Sampler
from tests.checkpoints import EOS_ID, make_checkpoint

VOCAB = 328
"""More than the tokenizer has: models are padded."""
STOP = (EOS_ID, 6)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
PLAIN = SamplingParams(1, temperature=1.0, seed=4, stop_token_ids=STOP)
GUIDED = replace(PLAIN, grammar=json_grammar(SCHEMA))
TOKENS_MAX = 120


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_layers=1)


@pytest.fixture(scope="module")
def compiler(directory: Path) -> GrammarCompiler:
    return GrammarCompiler(directory)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


class Model:
    """Logits that are a function of the sequence's tokens."""

    def __init__(self) -> None:
        self._table = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(8)) * 3

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._table[(sum(tokens) + len(tokens)) % 64]


def part_of(
    name: str, tokens: Sequence[int], start: int, params: SamplingParams, *, is_new: bool
) -> SequenceSlice:
    known = tuple(tokens) if is_new else ()
    return SequenceSlice(
        RequestKey(name, 1), tuple(tokens[start:]), start, is_new, (), params, known
    )


def answer(
    compiler: GrammarCompiler,
    params: SamplingParams,
    prompt: list[int],
    *,
    neighbours: Sequence[SamplingParams] = (),
    rng: random.Random | None = None,
) -> list[int]:
    """Generate, in a batch with others; with ``rng`` through fresh starts and repeated slices."""
    model, sampler = Model(), Sampler(compiler)
    params = replace(params, num_prompt_tokens=len(prompt))
    tokens, is_new, start = list(prompt), True, 0
    others = [
        (f"o{n}", list(range(n, n + 9)), replace(own, num_prompt_tokens=9))
        for n, own in enumerate(neighbours)
    ]
    first = True
    while len(tokens) - len(prompt) < TOKENS_MAX and (
        len(tokens) == len(prompt) or tokens[-1] not in STOP
    ):
        if rng is not None and rng.random() < 0.2:  # preempted, moved, or handed over
            sampler, is_new = Sampler(compiler) if rng.random() < 0.5 else sampler, True
            start, first = rng.randrange(len(tokens)), True
        own = part_of("r", tokens, start, params, is_new=is_new)
        parts = [own]
        for name, known, sampling in others:
            parts.append(
                part_of(name, known, 0 if first else len(known) - 1, sampling, is_new=first)
            )
        sampler.apply((), parts)
        is_new, start, first = False, len(tokens), False
        every = [tokens, *(known for _, known, _ in others)]
        logits = torch.stack([model.logits(one) for one in every])
        sampled = sampler.sample(logits, parts)
        if rng is not None and rng.random() < 0.2:  # that step failed, it is computed again
            again = [replace(part, is_new=False) for part in parts]
            assert sampler.sample(logits, again) == sampled
        assert not sampled[0].error
        for one, token in zip(every, sampled, strict=True):
            one.append(token.token_id)
    return tokens[len(prompt) :]


def is_instance(tokenizer: Any, tokens: Sequence[int]) -> bool:
    if tokens[-1] not in STOP:
        return False
    try:
        value = json.loads(tokenizer.decode(tokens[:-1]))
        jsonschema.validate(value, SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_answers_are_instances_of_the_schema(
    compiler: GrammarCompiler, tokenizer: Any, temperature: float, cut: dict[str, Any]
) -> None:
    guided = replace(GUIDED, temperature=temperature, **cut)
    for seed in range(5):
        own = replace(guided, seed=seed)
        assert is_instance(tokenizer, answer(compiler, own, [9, seed, 4]))
        plain = replace(own, grammar="")
        assert not is_instance(tokenizer, answer(compiler, plain, [9, seed, 4]))  # control


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), hot=st.booleans(), penalised=st.booleans())
def test_a_token_depends_on_the_tokens_before_it_alone(
    compiler: GrammarCompiler, seed: int, hot: bool, penalised: bool
) -> None:
    """Not on the batch, on where it began anew, or on how often a slice was computed."""
    rng = random.Random(seed)
    params = replace(
        GUIDED,
        seed=seed,
        temperature=1.0 if hot else 0.0,
        presence_penalty=1.0 if penalised else 0.0,
    )
    prompt = [rng.randrange(320) for _ in range(rng.randint(1, 20))]
    expected = answer(compiler, params, prompt)
    neighbours = [PLAIN, GUIDED, replace(PLAIN, temperature=0.0, num_logprobs=2)]
    assert answer(compiler, params, prompt, neighbours=neighbours) == expected
    assert answer(compiler, params, prompt, neighbours=neighbours[:1], rng=rng) == expected


def test_a_row_without_a_grammar_is_as_it_was(compiler: GrammarCompiler) -> None:
    alone = answer(compiler, PLAIN, [5, 6])
    assert answer(compiler, PLAIN, [5, 6], neighbours=[GUIDED, GUIDED]) == alone


def sample_one(
    sampler: Sampler, params: SamplingParams, tokens: list[int], num_prompt: int = 2
) -> SampledToken:
    params = replace(params, num_prompt_tokens=num_prompt)
    part = part_of("r", tokens, 0, params, is_new=True)
    sampler.apply((), [part])
    (token,) = sampler.sample(Model().logits(tokens)[None], [part])
    return token


def test_a_bias_chooses_only_among_what_is_allowed(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    (brace,) = tokenizer.encode("{", add_special_tokens=False)
    forced = replace(GUIDED, logit_bias=((9, 100.0), (brace, -100.0)))
    assert sample_one(Sampler(compiler), forced, [5, 6]).token_id == brace


def test_logprobs_are_of_the_logits_before_the_mask(compiler: GrammarCompiler) -> None:
    token = sample_one(Sampler(compiler), replace(GUIDED, num_logprobs=1), [5, 6])
    raw = Model().logits([5, 6]).log_softmax(0)
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(raw[token.token_id]))
    assert token.logprobs.top[0][0] == int(raw.argmax()) != token.token_id


def test_what_cannot_go_on_is_an_error_of_its_row_alone(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    done = tokenizer.encode('{"name":"x","size":1,"tags":[]}', add_special_tokens=False)
    cases = {
        "no grammar can be made": replace(GUIDED, grammar="{"),
        "no answer can match": replace(GUIDED, grammar=json_grammar({"$ref": "#"})),
        "does not match its grammar": GUIDED,
        "no stop token": replace(GUIDED, stop_token_ids=()),
    }
    for said, params in cases.items():
        generated = done if "stop" in said else [9, 9] if "does not" in said else []
        sampler = Sampler(compiler)
        bad = part_of(
            "bad", [5, 6, *generated], 0, replace(params, num_prompt_tokens=2), is_new=True
        )
        good = part_of("good", [5, 6], 0, replace(GUIDED, num_prompt_tokens=2), is_new=True)
        plain = part_of("plain", [5, 6], 0, replace(PLAIN, num_prompt_tokens=2), is_new=True)
        sampler.apply((), [bad, good, plain])
        parts = [bad, good, plain]
        logits = [Model().logits(part.known_token_ids) for part in parts]
        first, second, third = sampler.sample(torch.stack(logits), parts)
        assert said in first.error
        assert (second.error, third.error) == ("", "")
        assert second == sample_one(Sampler(compiler), GUIDED, [5, 6])
        assert third == sample_one(Sampler(compiler), PLAIN, [5, 6])


def test_an_answer_that_has_ended_may_be_in_a_step_in_flight(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    """What that step samples counts for nothing, and is no error."""
    done = tokenizer.encode('{"name":"x","size":1,"tags":[]}', add_special_tokens=False)
    sampler = Sampler(compiler)
    ended = sample_one(sampler, GUIDED, [5, 6, *done])
    assert ended.token_id in STOP
    tokens = [5, 6, *done, ended.token_id]
    params = replace(GUIDED, num_prompt_tokens=2)
    for _ in range(3):
        part = part_of("r", tokens, len(tokens) - 1, params, is_new=False)
        (token,) = sampler.sample(Model().logits(tokens)[None], [part])
        assert token.error == ""
        tokens.append(token.token_id)


def test_a_sampler_without_a_checkpoint_says_so() -> None:
    assert "without grammars" in sample_one(Sampler(), GUIDED, [5, 6]).error


def test_nothing_is_kept_of_what_ended_or_has_no_grammar(compiler: GrammarCompiler) -> None:
    sampler = Sampler(compiler)
    for name, params in (("plain", PLAIN), ("guided", GUIDED)):
        part = part_of(name, [5, 6], 0, replace(params, num_prompt_tokens=2), is_new=True)
        sampler.apply((), [part])
        sampler.sample(Model().logits([5, 6])[None], [part])
    assert len(sampler.grammars) == 1
    sampler.apply([RequestKey("guided", 1)], ())
    assert len(sampler.grammars) == 0


@pytest.mark.parametrize("told_apart", [True, False])
def test_a_clients_stop_token_may_occur_in_an_answer(
    compiler: GrammarCompiler, tokenizer: Any, *, told_apart: bool
) -> None:
    """Control: where it is taken for one of the checkpoint's, the answer cannot even begin."""
    (brace,) = tokenizer.encode("{", add_special_tokens=False)
    params = replace(GUIDED, stop_token_ids=(*STOP, brace), num_prompt_tokens=2)
    if told_apart:
        params = replace(params, eos_token_ids=STOP)
    sampler = Sampler(compiler)
    part = part_of("r", [7, 8], 0, params, is_new=True)
    sampler.apply((), [part])
    (sampled,) = sampler.sample(Model().logits([7, 8])[None], [part])
    assert bool(sampled.error) is not told_apart
    if told_apart:
        assert tokenizer.decode([sampled.token_id]).startswith("{")
