"""Comments in streams that wait for their first token."""

import asyncio
import json
from collections import defaultdict
from typing import Any

import pytest

from disagg.router.comments import COMMENT, commented
from tests.unit.router.test_http_errors import COMPLETION
from tests.unit.router.test_tools import client_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
RESPONSE = {"model": "tiny", "input": "hi", "max_output_tokens": 3}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", COMPLETION),
    ("/v1/completions", COMPLETION | {"n": 2}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", RESPONSE),
]
MARK = COMMENT.strip().decode()


async def lines_after_comments(house, path: str, body: dict[str, Any], go_on) -> list[str]:
    """Of a stream that waits until it has had three comments; ``go_on`` ends the waiting then."""
    async with house.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines, num_comments = [], 0
        async for line in response.aiter_lines():
            if line != MARK:
                lines.append(line)
            elif (num_comments := num_comments + 1) == 3:
                assert not any(lines)  # nothing else came before them
                await go_on()
        assert num_comments >= 3
    return [line for line in lines if line]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_stream_that_waits_hears_comments_and_then_its_tokens(open_house, path, body):
    gate = asyncio.Semaphore(0)
    house = await open_house(comment_ms=20)
    await house.add(gate=gate)

    async def go_on() -> None:
        for _ in range(40):
            gate.release()

    lines = await lines_after_comments(house, path, body, go_on)
    whole = (await house.http.post(path, json=body)).json()
    assert streamed_texts(lines) == whole_texts(whole)


def streamed_texts(lines: list[str]) -> list[str]:
    """Of each choice."""
    texts: dict[int, str] = defaultdict(str)
    for line in lines:
        data = json.loads(line[6:]) if line.startswith("data: {") else {}
        for choice in data.get("choices", ()):
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {})["content"]
        if data.get("type") == "response.output_text.delta":
            texts[0] += data["delta"]
    return [text for _, text in sorted(texts.items())]


def whole_texts(answer: dict[str, Any]) -> list[str]:
    if "output" in answer:
        return [answer["output"][0]["content"][0]["text"]]
    return [
        one["text"] if "text" in one else one["message"]["content"] for one in answer["choices"]
    ]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_error_behind_comments_is_an_event(open_house, path, body):
    house = await open_house(comment_ms=20, drain_timeout_ms=1)
    await house.add(gate=asyncio.Semaphore(0))
    stops: list[asyncio.Task[None]] = []

    async def stop() -> None:
        stops.append(asyncio.create_task(house.app.stop()))

    lines = await lines_after_comments(house, path, body, stop)
    await stops[0]
    assert "the router is stopping" in lines[-1]
    assert "data: [DONE]" not in lines
    events = [line for line in lines if line.startswith("event: ")]
    begins = path == "/v1/responses"
    assert events[:1] == (["event: response.created"] if begins else [])
    assert events[-1:] == (["event: response.failed"] if begins else [])


async def test_without_the_setting_an_error_has_its_own_status(open_house):
    """Negative control: nothing is sent before the first token."""
    house = await open_house(drain_timeout_ms=1)
    worker = await house.add(gate=asyncio.Semaphore(0))
    answer = asyncio.create_task(
        house.http.post("/v1/completions", json=COMPLETION | {"stream": True})
    )
    await worker.until(lambda: worker.submits, "the submit")
    await house.app.stop()
    assert (await answer).status_code == 503


async def test_who_leaves_while_comments_are_sent_is_given_up(open_house):
    house = await open_house(comment_ms=20)
    worker = await house.add(gate=asyncio.Semaphore(0))
    with pytest.raises(ConnectionError):
        await lines_after_comments(house, "/v1/completions", COMPLETION, leave)
    await worker.until(lambda: worker.cancels, "a cancel")


async def leave() -> None:
    raise ConnectionError


async def test_openais_client_passes_over_comments(open_house):
    gate = asyncio.Semaphore(0)
    house = await open_house(comment_ms=20)
    worker = await house.add(gate=gate)
    async with client_of(house) as client:
        asked = asyncio.create_task(client.chat.completions.create(**CHAT, stream=True))
        await worker.until(lambda: worker.submits, "the submit")
        stream = await asked  # there is a status before there is a token
        for _ in range(40):
            gate.release()
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_what_is_waited_for_has_ended_before_its_reader_goes_on():
    ended = False

    async def first() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended = True

    async def comment(data: bytes) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await commented(first(), comment, 1)
    assert ended
