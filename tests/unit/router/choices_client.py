"""Several choices of one request: what a test asks, and the texts of what it gets."""

import json
from typing import Any

from disagg.messages.submit import Submit
from disagg.testing.scripted_worker import BLOCK_TOKENS

PROMPT = [5, 6]
LONG = list(range(10, 10 + BLOCK_TOKENS + 2))
"""It fills a block."""
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "seed": 40}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def token_of(submit: Submit):
    """Another printable token at each place of each seed."""
    return lambda position: 40 + (position + 7 * submit.sampling.seed) % 50


async def ask(house, path="completions", **body) -> dict[str, Any]:
    answer = await house.http.post(
        f"/v1/{path}", json=(BODY if path == "completions" else {}) | body
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(house, path="completions", **body) -> list[Any]:
    """The data of a stream, without the [DONE] that must end it."""
    body = (BODY if path == "completions" else {}) | body | {"stream": True}
    async with house.http.stream("POST", f"/v1/{path}", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def texts_of(chunks: list[Any], num: int) -> list[str]:
    """The texts of a stream's choices, each of which must end once."""
    found, ends = [""] * num, [0] * num
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert not ends[choice["index"]]
            found[choice["index"]] += choice["text"]
            ends[choice["index"]] += choice["finish_reason"] is not None
    assert ends == [1] * num
    return found


async def alone(house, **body) -> str:
    (text,) = texts(await ask(house, **body))
    return text
