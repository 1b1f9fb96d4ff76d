"""What an answer shows besides its text: running usage, token ids, special tokens."""

import asyncio
import json
from typing import Any

import pytest

from disagg.router.chat import Chat

PROMPT = [5, 6]
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 6,
}
BODIES = {"completions": BODY, "chat/completions": CHAT}


async def ask(house, path="completions", **body) -> dict[str, Any]:
    answer = await house.http.post(f"/v1/{path}", json=BODIES[path] | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(house, path="completions", **body) -> list[Any]:
    """The data of a stream, without the [DONE] that must end it."""
    body = BODIES[path] | body | {"stream": True}
    async with house.http.stream("POST", f"/v1/{path}", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
async def test_running_usage_grows_to_that_of_the_choice(house, path, n):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(house, path, stream_options=options, n=n)
    *chunks, last = chunks
    assert last["choices"] == []
    num_prompt = last["usage"]["prompt_tokens"]
    assert last["usage"]["completion_tokens"] == 6 * n
    seen: dict[int, list[int]] = {index: [0] for index in range(n)}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == num_prompt
        assert usage["total_tokens"] == num_prompt + usage["completion_tokens"]
        assert usage["completion_tokens"] >= seen[choice["index"]][-1]
        seen[choice["index"]].append(usage["completion_tokens"])
    assert [counts[-1] for counts in seen.values()] == [6] * n
    # Controls: without it there is none before the end, and alone it does nothing.
    *chunks, last = await stream(house, path, stream_options={"include_usage": True})
    assert {json.dumps(chunk["usage"]) for chunk in chunks} == {"null"}
    chunks = await stream(house, path, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in chunks)


async def test_running_usage_as_guidellm_asks_for_it(house):
    """Its chat and text requests of 0.8.1, fields and all."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    more = {"stream_options": options, "ignore_eos": True, "stop": None}
    for path in BODIES:
        tokens = {"max_completion_tokens": 6} if path != "completions" else {}
        chunks = await stream(house, path, **more, **tokens)
        assert chunks[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("path", BODIES)
async def test_token_ids_of_prompt_and_answer(house, path):
    answer = await ask(house, path, return_token_ids=True, n=2)
    submit = house.workers[0].submits[0]
    prompt = list(submit.token_ids)
    expected = [house.workers[0].script.token(len(prompt) + nth) for nth in range(6)]
    for choice in answer["choices"]:
        assert choice["token_ids"] == expected
        if path == "completions":
            assert choice["prompt_token_ids"] == prompt
    if path != "completions":
        assert answer["prompt_token_ids"] == prompt
    chunks = await stream(house, path, return_token_ids=True, n=2)
    found: list[list[int]] = [[], []]
    prompts: list[list[Any]] = [[], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice.get("token_ids", [])
        shown = choice if path == "completions" else chunk
        if "prompt_token_ids" in shown:
            prompts[choice["index"]].append(shown["prompt_token_ids"])
    assert found == [expected] * 2
    assert prompts == [[prompt]] * 2  # with the first chunk of each, and only there
    # Control: they are not there unasked.
    assert "token_ids" not in json.dumps(await ask(house, path))
    assert "token_ids" not in json.dumps(await stream(house, path, return_token_ids=False))


@pytest.mark.parametrize("path", BODIES)
async def test_special_tokens_of_an_answer_are_shown_if_wanted(open_house, path):
    house = await open_house()
    special = house.tokenizer._tokenizer.all_special_ids[0]
    text = house.tokenizer.decode_all([special])
    assert text
    word = house.tokenizer.encode("x", add_special_tokens=False)[0]
    await house.add(token=lambda position: special if position % 2 else word)

    async def shown(**body) -> set[str]:
        answer = await ask(house, path, ignore_eos=True, **body)
        (choice,) = answer["choices"]
        whole = choice["text"] if path == "completions" else choice["message"]["content"]
        chunks = await stream(house, path, ignore_eos=True, **body)
        parts = [chunk["choices"][0] for chunk in chunks]
        if path == "completions":
            return {whole, "".join(part["text"] for part in parts)}
        return {whole, "".join(part["delta"].get("content", "") for part in parts)}

    (whole,) = await shown(skip_special_tokens=False)
    assert whole.count(text) == 3
    (short,) = await shown()
    assert short == whole.replace(text, "") == "xxx"
    assert await shown(skip_special_tokens=True) == {short}
    if path == "completions":
        answer = await ask(
            house, ignore_eos=True, echo=True, prompt=[word, special], skip_special_tokens=False
        )
        assert answer["choices"][0]["text"] == "x" + text + whole


async def test_the_offsets_of_logprobs_count_shown_special_tokens(open_house):
    house = await open_house()
    special = house.tokenizer._tokenizer.all_special_ids[0]
    text = house.tokenizer.decode_all([special])
    await house.add(token=lambda position: special)
    for skip, each in ((True, 0), (False, len(text))):
        answer = await ask(
            house, ignore_eos=True, logprobs=0, max_tokens=3, skip_special_tokens=skip
        )
        offsets = answer["choices"][0]["logprobs"]["text_offset"]
        assert offsets == [0, each, 2 * each]


@pytest.mark.parametrize("path", BODIES)
async def test_a_priority_reaches_the_queue(open_house, path):
    """What waits goes by it; one request runs at a time."""
    house = await open_house(worker_prefill_tokens_max=1)
    prompt = len(house.tokenizer.encode_chat(Chat(tuple(CHAT["messages"]))))
    worker = await house.add(prompt=prompt, gate=asyncio.Semaphore(0))
    core = house.app.dispatcher.core
    tasks = []
    for number, priority in enumerate((None, 5, 0, -3)):
        headers = {"x-request-id": f"r{number}"}
        body = BODIES[path] | {"priority": priority, "max_tokens": 1}
        tasks.append(
            asyncio.create_task(house.http.post(f"/v1/{path}", json=body, headers=headers))
        )
        await house.until(lambda: core.num_live == number + 1, "the request")  # noqa: B023
    assert core.num_waiting == 3
    for _ in range(8):
        worker.gate.release()
    assert [(await task).status_code for task in tasks] == [200] * 4
    order = [submit.key.request_id for submit in worker.submits]
    assert order == ["r0", "r3", "r2", "r1"]


async def test_special_tokens_of_a_prompt_are_added_as_wanted(house, monkeypatch):
    """To a plain text unless it is refused, to a chat only if it is wanted."""
    tokenizer = house.app._tokenizer
    backend = tokenizer._backend
    seen = []
    encode = type(backend).encode_batch_fast

    class Watched:
        def encode_batch_fast(self, texts, add_special_tokens):
            seen.append(add_special_tokens)
            return encode(backend, texts, add_special_tokens=add_special_tokens)

        def __getattr__(self, name):
            return getattr(backend, name)

    monkeypatch.setattr(tokenizer, "_backend", Watched())
    for path, usual in (("completions", True), ("chat/completions", False)):
        more = {"prompt": "the cat"} if path == "completions" else {}
        for given, expected in (({}, usual), (True, True), (False, False), (None, usual)):
            body: dict[str, Any] = {} if given == {} else {"add_special_tokens": given}
            await ask(house, path, **more, **body)
            assert seen.pop() is expected
    assert not seen
