"""Texts over HTTP of a model whose decoder puts spaces before words, special tokens among them."""

import json
import shutil

import pytest
from tokenizers import decoders

from disagg.router.tokenizer import Tokenizer
from tests.unit.router.test_generation import chunks_of

DECODERS = {
    "metaspace": decoders.Metaspace(),
    "llama": decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "none": None,
}
EURO = [f"<0x{byte:02X}>" for byte in "€".encode()]
WORDS = [
    "▁hello",
    "<pad>",
    "▁world",
    "<|user|>",
    "<|user|>",
    "▁again",
    "!",
    *EURO,
    "<pad>",
    "▁",
    "▁x",
]
PROMPTS = {"text": ["▁hello"], "special": ["▁hello", "<|user|>"], "nothing": ["<bos>", "<|user|>"]}


@pytest.fixture(params=DECODERS)
def checkpoint(request, model_dir, tmp_path):
    """The checkpoint with another tokenizer: a few words and bytes, the same special tokens."""
    path = shutil.copytree(model_dir, tmp_path / "model")
    file = path / "tokenizer.json"
    described = json.loads(file.read_text())
    tokens = [token["content"] for token in described["added_tokens"]]
    tokens += [word for word in dict.fromkeys(WORDS) if word not in tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    decoder = DECODERS[request.param]
    described["model"] = {"type": "WordLevel", "vocab": vocab, "unk_token": "<pad>"}
    described["decoder"] = decoder and json.loads(decoder.__getstate__())
    file.write_text(json.dumps(described))
    return path


def ids_of(tokenizer, tokens):
    return [tokenizer._backend.token_to_id(token) for token in tokens]


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_answer_and_stream_are_one_decode(open_house, checkpoint, prompt):
    tokenizer = Tokenizer(checkpoint)
    prompt_ids, ids = ids_of(tokenizer, PROMPTS[prompt]), ids_of(tokenizer, WORDS)
    before = tokenizer.decode(prompt_ids)
    expected = tokenizer.decode([*prompt_ids, *ids])[len(before) :]
    house = await open_house(checkpoint=checkpoint)
    await house.add(token=lambda p: ids[p - len(prompt_ids)])
    body = {"model": "tiny", "prompt": prompt_ids, "max_tokens": len(ids)}
    whole = (await house.http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    chunks = await chunks_of(house, "/v1/completions", body)
    streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
    assert whole == streamed == expected
    # Negative control: decoded piece by piece the words lose their spaces.
    assert "".join(tokenizer.decode([token_id]) for token_id in ids) != expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_special_tokens(open_house, checkpoint, stream):
    tokenizer = Tokenizer(checkpoint)
    prompt_ids, ids = ids_of(tokenizer, PROMPTS["text"]), ids_of(tokenizer, WORDS)
    before = tokenizer.decode(prompt_ids)
    expected = tokenizer.decode([*prompt_ids, *ids])[len(before) :]
    stop = expected[expected.index("world") + 2 : expected.index("again") + 2]  # such as "rld ag"
    house = await open_house(checkpoint=checkpoint)
    await house.add(token=lambda p: ids[p - len(prompt_ids)])
    body = {"model": "tiny", "prompt": prompt_ids, "max_tokens": len(ids), "stop": stop}
    if stream:
        chunks = await chunks_of(house, "/v1/completions", body)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
    else:
        answer = await house.http.post("/v1/completions", json=body)
        text = answer.json()["choices"][0]["text"]
    assert text == expected[: expected.index(stop)]
