"""Parts of a streamed answer are written at once: what comes is HTTP as it should be anyway."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from disagg.router.client_stream import ClientStream
from disagg.router.http_cycle import Cycle
from disagg.router.openai.completion_format import CompletionFormat
from tests.unit.router.scripted_worker import BOUND_S

POST = (
    b"POST /v1/completions HTTP/%b\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"%bcontent-length: %d\r\n\r\n%b"
)
NUM_TOKENS = 9
ASKED = {"model": "tiny", "prompt": [5, 6], "max_tokens": NUM_TOKENS, "stream": True}


async def answer(house: Any, version: str, num: int = 1) -> bytes:
    """All that comes over one connection for requests one after the other."""
    body = json.dumps(ASKED).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", house.app.http_port)
    try:
        received = b""
        async with asyncio.timeout(BOUND_S):
            for number in range(1, num + 1):
                close = b"connection: close\r\n" if number == num else b""
                writer.write(POST % (version.encode(), close, len(body), body))
                while number < num and received.count(b"[DONE]") < number:
                    received += await reader.read(1 << 16)
            return received + await reader.read()
    finally:
        writer.close()


def text_of(events: bytes) -> str:
    lines = [line[6:] for line in events.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def unchunked(data: bytes) -> tuple[bytes, list[bytes], bytes]:
    """Head, parts, and what is behind the last of them."""
    head, _, rest = data.partition(b"\r\n\r\n")
    parts: list[bytes] = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        num = int(size, 16)
        part, end, rest = rest[:num], rest[num : num + 2], rest[num + 2 :]
        assert (len(part), end) == (num, b"\r\n")
        if not num:
            return head, parts, rest
        parts.append(part)


async def test_each_token_is_a_part_of_its_own(open_house):
    gate = asyncio.Semaphore(0)
    house = await open_house()
    await house.add(gate=gate)
    asked = asyncio.create_task(answer(house, "1.1"))
    for _ in range(NUM_TOKENS):
        gate.release()
        await asyncio.sleep(0.02)  # else tokens that wait are joined, which is no fault
    head, parts, rest = unchunked(await asked)
    assert b"transfer-encoding: chunked" in head.lower()
    assert not rest
    assert len(parts) > 2  # or nothing was streamed
    for _ in range(NUM_TOKENS):
        gate.release()
    whole = await house.http.post("/v1/completions", json=ASKED | {"stream": False})
    assert text_of(b"".join(parts)) == whole.json()["choices"][0]["text"]


async def test_answers_follow_each_other_on_one_connection(house):
    data = await answer(house, "1.1", num=3)
    texts = []
    while data:
        _, parts, data = unchunked(data)
        texts.append(text_of(b"".join(parts)))
    assert len(texts) == 3
    assert len(set(texts)) == 1


async def test_who_knows_no_parts_gets_none(house):
    head, _, body = (await answer(house, "1.0")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    whole = await house.http.post("/v1/completions", json=ASKED | {"stream": False})
    assert text_of(body) == whole.json()["choices"][0]["text"]


async def test_parts_are_written_without_waiting(house, monkeypatch):
    """The control of the others: they are about another way than that of what may have to wait."""
    sent = []
    go_on = Cycle.go_on

    async def go_on_seen(self: Any, data: bytes, *, more: bool) -> None:
        sent.append(data)
        await go_on(self, data, more=more)

    monkeypatch.setattr(Cycle, "go_on", go_on_seen)
    async with httpx.AsyncClient(base_url=house.url, timeout=BOUND_S) as client:
        got = await client.post("/v1/completions", json=ASKED)
    assert b"".join(sent).endswith(b"data: [DONE]\n\n")
    assert got.text.count("choices") > sum(one.count(b"choices") for one in sent) + 1


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_who_leaves_in_the_middle_ends_its_request(open_house, version):
    gate = asyncio.Semaphore(3)
    house = await open_house()
    worker = await house.add(gate=gate)
    body = json.dumps(ASKED).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", house.app.http_port)
    writer.write(POST % (version.encode(), b"", len(body), body))
    async with asyncio.timeout(BOUND_S):
        await reader.readuntil(b"choices")
    writer.transport.abort()
    await worker.until(lambda: bool(worker.cancels), "a cancel")


async def test_tokens_do_not_wake_the_reader_unless_they_must(open_house, monkeypatch):
    """Each token is written when it comes; negative control: an answer with stop strings is not."""
    gate = asyncio.Semaphore(0)
    house = await open_house()
    await house.add(gate=gate)
    woken = []
    real = ClientStream.next

    async def counted(stream):
        delta = await real(stream)
        woken.append(delta)
        return delta

    monkeypatch.setattr(ClientStream, "next", counted)
    for stop in (None, ["\x00"]):
        woken.clear()
        asked = ASKED | ({"stop": stop} if stop else {})
        running = asyncio.create_task(house.http.post("/v1/completions", json=asked))
        for number in range(NUM_TOKENS):
            gate.release()
            await house.until(
                lambda number=number: (
                    house.app.dispatcher.core.counters["tokens", ""] % NUM_TOKENS
                    == (number + 1) % NUM_TOKENS
                ),
                "the token",
            )
            await asyncio.sleep(0.01)  # the reader waits again
        assert (await running).status_code == 200
        assert (len(woken) > 4) == bool(stop), len(woken)


async def test_a_format_that_fails_ends_its_own_answer_alone(open_house, monkeypatch):
    """It fails in the middle of a worker's message, which concerns others as well."""
    gate = asyncio.Semaphore(0)
    house = await open_house()
    worker = await house.add(gate=gate)
    sessions = list(house.app.dispatcher.sessions)
    real, calls = CompletionFormat.chunk, []

    def failing(self, index, piece):
        calls.append(piece)
        if len(calls) == 4:
            raise ValueError("a bug")
        return real(self, index, piece)

    monkeypatch.setattr(CompletionFormat, "chunk", failing)
    asked = asyncio.create_task(house.http.post("/v1/completions", json=ASKED))
    for _ in range(NUM_TOKENS):
        gate.release()
        await asyncio.sleep(0.02)
    with pytest.raises(httpx.RemoteProtocolError):  # it must not look complete
        await asked
    await worker.until(lambda: worker.cancels, "the worker to hear of it")
    monkeypatch.undo()
    for _ in range(NUM_TOKENS):
        gate.release()
    assert (await house.http.post("/v1/completions", json=ASKED)).status_code == 200
    assert list(house.app.dispatcher.sessions) == sessions, "the worker was lost for it"
