"""The tests' own checkpoints: deterministic, usable by tokenizers, and not degenerate."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.checkpoints import EOS_ID, make_checkpoint, reference_generate
from tests.tiny_families import FAMILIES


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_same_arguments_same_bytes(family: str, tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(7)  # whatever drew before must not matter
        directory = make_checkpoint(tmp_path / name, family, seed=seed)
        weights.append((directory / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_text_varies_and_depends_on_the_prompt(family: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, family)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    texts = set()
    for prompt in ("to be or not to be", "a different prompt"):
        tokens, logprobs, min_gap = reference_generate(directory, tokenizer(prompt).input_ids, 40)
        assert len(set(tokens)) >= 10
        assert EOS_ID not in tokens
        assert all(logprob < 0 for logprob in logprobs)
        assert min_gap > 1e-4
        text = str(tokenizer.decode(tokens))
        assert text.isascii()
        texts.add(text)
    assert len(texts) == 2


def test_tokenizer_covers_the_vocabulary_and_any_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path, "qwen3"))
    assert len(tokenizer) == 320
    text = "the wörld – 世界, 42"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<bos><|user|>hi<|end|><|assistant|>"
