"""Tokenizer and incremental detokenisation."""

import json
import shutil

import pytest

from disagg.errors import ConfigError
from disagg.router.chat import Chat
from disagg.router.tokenizer import Tokenizer
from tests.checkpoints import make_no_file

TEXTS = ["plain words here", "naïve café — 5 €", "日本語のテスト", "👩‍👩‍👧‍👦 and 🏳️‍🌈!", "a\ufffdb"]


def stream(tokenizer, token_ids, prompt=()):
    detokenizer = tokenizer.detokenizer(prompt)
    return [detokenizer.push(token_id) for token_id in token_ids]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_never_break_a_character(tokenizer, text):
    ids = tokenizer.encode(text)[1:]
    pieces = stream(tokenizer, ids, prompt=tokenizer.encode("before "))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    # Negative control: decoding token by token does break these texts.
    naive = [tokenizer.decode([i]) for i in ids]
    assert text.isascii() or any("\ufffd" in piece for piece in naive)


def test_an_unfinished_character_at_the_end_is_not_shown_until_it_must_be(tokenizer):
    ids = tokenizer.encode("ok €")[1:]
    detokenizer = tokenizer.detokenizer(())
    assert "".join(map(detokenizer.push, ids[:-1])) == "ok "
    assert "ok " + detokenizer.finish() == tokenizer.decode(ids[:-1]) == "ok \ufffd"


def test_special_tokens_are_not_shown_but_are_named_in_logprobs(tokenizer):
    eos = tokenizer.eos_token_ids[0]
    assert stream(tokenizer, [eos]) == [""]
    assert tokenizer.token_bytes(eos) == b"<eos>"
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode("a €")[1:]) == "a €".encode()


def test_chat_template_and_defaults(tokenizer):
    ids = tokenizer.encode_chat(Chat(({"role": "user", "content": "hi"},)))
    assert tokenizer._backend.decode(list(ids), skip_special_tokens=False) == (
        "<bos><|user|>hi<|end|><|assistant|>"
    )
    assert tokenizer.vocab_size == 320
    assert tokenizer.eos_token_ids == (2, 6)


def test_a_directory_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[" * 200_000, "maximum recursion depth"),
        ('{"text_config": ["x"]}', "text_config is not an object"),
    ],
)
def test_an_odd_config_is_refused(tmp_path, config, said):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=said):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "directory"])
def test_what_is_no_file_is_refused_by_name(model_dir, tmp_path, name, kind):
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    path = make_no_file(tmp_path, kind, name)
    with pytest.raises(ConfigError, match=f"^{path}: "):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("model_type", [None, 3])
def test_a_model_type_that_is_no_name_is_an_unknown_one(model_dir, tmp_path, model_type):
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    assert Tokenizer(tmp_path).messages.tools == ""


def test_a_missing_tokenizer_file_is_named(model_dir, tmp_path):
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing there"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3", "cohere2"])
def test_a_tokenizer_that_transformers_makes_of_nothing_is_refused(tmp_path, model_type):
    """Every text would be the same token, or none, and each answer empty."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=r"knows no token that is text.*is missing"):
        Tokenizer(tmp_path)
