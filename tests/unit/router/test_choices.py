"""Several choices of one request, `n` and `best_of`: which they are, and when they start."""

import asyncio
import json
from typing import Any

import pytest

from disagg.messages.outputs import FinishReason, SequenceOutput, StepOutputs
from disagg.messages.sampling import TokenLogprobs
from disagg.messages.submit import Submit
from disagg.router.client_stream import ClientStream
from tests.unit.router.choices_client import (
    BODY,
    CHAT,
    LONG,
    PROMPT,
    alone,
    ask,
    stream,
    texts,
    texts_of,
    token_of,
)


async def test_choices_have_seeds_that_follow_each_other(seeded):
    """They differ, and each can be had again alone."""
    expected = [await alone(seeded, seed=40 + nth) for nth in range(3)]
    assert len(set(expected)) == 3
    answer = await ask(seeded, n=3)
    assert texts(answer) == expected
    assert texts_of(await stream(seeded, n=3), 3) == expected
    # The prompt counts once, what was generated as often as it was.
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 18
    # Two choices of each of two prompts: those of a prompt are neighbours.
    both = await ask(seeded, n=2, prompt=[PROMPT, [9, 8, 7]])
    assert texts(both)[:2] == expected[:2]
    assert texts(both)[2:] == texts(await ask(seeded, n=2, prompt=[9, 8, 7]))
    assert both["usage"]["prompt_tokens"] == 5


async def test_cached_tokens_of_a_prompt_count_once_for_all_its_choices(open_house):
    house = await open_house()
    await house.add(hit_tokens=1)
    (cached,) = (await ask(house))["usage"]["prompt_tokens_details"].values()
    assert cached == 1
    usage = (await ask(house, n=3, prompt=[PROMPT, [9, 8, 7]]))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_an_answer_that_is_not_streamed_wakes_its_request_at_its_end_only(
    open_house, monkeypatch
):
    reads = []
    read = ClientStream.next

    def counted(stream):
        reads.append(stream.request_id)
        return read(stream)

    monkeypatch.setattr(ClientStream, "next", counted)
    house = await open_house()
    gate = asyncio.Semaphore(0)
    await house.add(gate=gate)
    headers = {"x-request-id": "whole"}
    body = BODY | {"max_tokens": 9}
    asked = asyncio.create_task(house.http.post("/v1/completions", json=body, headers=headers))

    def num_tokens() -> int:
        record = house.app.dispatcher.core.record("whole")
        return 0 if record is None else record.num_tokens

    for number in range(1, 10):  # each comes alone, while the request waits
        gate.release()
        await house.until(lambda number=number: num_tokens() == number, "a token")
    answer = (await asked).json()
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["choices"][0]["text"] == house.tokenizer.decode(house.script[:9])
    assert len(reads) == 1


async def test_choices_without_a_seed_differ_and_say_how_to_have_them_again(seeded):
    body = {"n": 3, "seed": None}
    headers = {"x-request-id": "free"}
    answer = await seeded.http.post("/v1/completions", json=BODY | body, headers=headers)
    found = texts(answer.json())
    assert len(set(found)) == 3
    for index, text in enumerate(found):
        record = (await seeded.admin.get(f"/v1/disagg/requests/free-{index}")).json()
        assert await alone(seeded, seed=record["seed"]) == text


async def test_the_seed_after_the_last_one_is_the_first_one(seeded):
    await ask(seeded, n=2, seed=2**63 - 1)
    seeds = [submit.sampling.seed for submit in seeded.workers[0].submits]
    assert seeds == [2**63 - 1, -(2**63)]


async def test_ids_and_records_of_choices(seeded):
    headers = {"x-request-id": "mine"}
    answer = await seeded.http.post("/v1/completions", json=BODY | {"n": 2}, headers=headers)
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["id"] == "cmpl-mine"
    for index in range(2):
        record = (await seeded.admin.get(f"/v1/disagg/requests/mine-{index}")).json()
        assert (record["request_id"], record["outcome"]) == (f"mine-{index}", "length")
    missing = await seeded.admin.get("/v1/disagg/requests/cmpl-mine")
    assert missing.status_code == 404
    assert "cmpl-mine-0, cmpl-mine-1, …" in missing.json()["error"]["message"]
    assert (await seeded.admin.get(f"/v1/disagg/requests/{answer.json()['id']}-1")).is_success
    # One choice has the id itself.
    await seeded.http.post("/v1/completions", json=BODY, headers=headers)
    assert (await seeded.admin.get("/v1/disagg/requests/mine")).status_code == 200


@pytest.mark.parametrize("prompt", [PROMPT, LONG])
async def test_a_prompt_that_fills_blocks_is_computed_by_its_first_choice_alone(house, prompt):
    """The others come when it has two tokens: then both workers have the blocks."""
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(0)
    request = asyncio.create_task(ask(house, prompt=prompt, n=3))
    await worker.until(lambda: worker.submits, "the first choice")
    worker.gate.release()
    await worker.until(lambda: worker.num_sent == 1, "its first token")
    if prompt is PROMPT:  # there is nothing to wait for
        await worker.until(lambda: len(worker.submits) == 3, "all choices")
    else:
        first = worker.submits[0].key.request_id
        await house.until(
            lambda: house.app.dispatcher.core.record(first).num_tokens == 1, "the token"
        )
        assert len(worker.submits) == 1
        worker.gate.release()
        await worker.until(lambda: len(worker.submits) == 3, "all choices")
        assert worker.num_sent == 2
    for _ in range(18):
        worker.gate.release()
    assert len(texts(await request)) == 3


async def test_choices_follow_a_first_one_that_is_over_at_once(house):
    assert len(texts(await ask(house, prompt=LONG, n=3, max_tokens=1))) == 3


async def test_choices_interleave_in_a_stream(seeded):
    """All have been heard of before one of them ends."""
    worker = seeded.workers[0]
    worker.gate = asyncio.Semaphore(0)
    body = BODY | {"n": 3, "stream": True}
    chunks: list[Any] = []

    async def take_turns() -> None:
        await worker.until(lambda: len(worker.submits) == 3, "all choices")
        for _ in range(6):  # who has had a token waits behind the others
            worker.gate.release()

    turns = asyncio.create_task(take_turns())
    async with seeded.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line async for line in answer.aiter_lines() if line)
        unheard = {0, 1, 2}
        while unheard:
            chunks.append(json.loads((await anext(lines)).removeprefix("data: ")))
            unheard -= {choice["index"] for choice in chunks[-1]["choices"]}
        await turns
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        for _ in range(12):
            worker.gate.release()
        rest = [line.removeprefix("data: ") async for line in lines]
    assert rest.pop() == "[DONE]"
    whole = texts_of(chunks + [json.loads(line) for line in rest], 3)
    worker.gate = None
    assert whole == texts(await ask(seeded, n=3))


async def test_chat_choices(seeded):
    body = CHAT | {"n": 2, "seed": 3, "max_tokens": 5}
    single = [
        (await ask(seeded, "chat/completions", **body | {"n": 1, "seed": seed}))["choices"][0]
        for seed in (3, 4)
    ]
    answer = await ask(seeded, "chat/completions", **body)
    assert [choice["message"] for choice in answer["choices"]] == [
        choice["message"] for choice in single
    ]
    assert answer["usage"]["completion_tokens"] == 10
    chunks = await stream(seeded, "chat/completions", **body)
    deltas: list[list[Any]] = [[], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        deltas[choice["index"]].append(choice)
    for choices, whole in zip(deltas, single, strict=True):
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        content = "".join(choice["delta"].get("content", "") for choice in choices)
        assert content == whole["message"]["content"]
        assert [choice["finish_reason"] for choice in choices][-1] == "length"


def answer_with(logprobs: dict[int, list[float]]):
    """Answers by seed, each token with its logprob."""

    def answers(submit: Submit) -> list[Any]:
        start = len(submit.token_ids)
        given = logprobs[submit.sampling.seed]
        ids = tuple(token_of(submit)(start + nth) for nth in range(len(given)))
        wanted = submit.sampling.num_logprobs is not None
        shown = tuple(TokenLogprobs(one) for one in given) if wanted else ()
        return [
            StepOutputs((SequenceOutput(submit.key, start, ids, shown, FinishReason.STOP),)),
        ]

    return answers


async def test_the_best_of_several_are_those_with_the_best_mean_logprob(house):
    """Not those with the best sum: they would be the shortest."""
    worker = house.workers[0]
    worker.token_of = token_of
    logprobs = {40: [-1.0, -1.0], 41: [-0.9] * 4, 42: [-3.0], 43: [-0.1, -0.3, -0.2]}
    worker.misbehave = answer_with(logprobs)
    every = texts(await ask(house, n=4))
    assert len(set(every)) == 4
    answer = await ask(house, best_of=4)
    assert texts(answer) == [every[3]]
    assert texts(await ask(house, best_of=4, n=2)) == [every[3], every[1]]
    assert texts(await ask(house, best_of=4, n=4)) == every  # all of them, in their order
    # What was generated for it counts.
    assert answer["usage"]["completion_tokens"] == 10
    assert answer["choices"][0]["logprobs"] is None
    shown = await ask(house, best_of=4, logprobs=0)
    assert shown["choices"][0]["logprobs"]["token_logprobs"] == logprobs[43]
    # Each prompt has its own best.
    pair = await ask(house, best_of=4, prompt=[PROMPT, [9, 8]])
    assert texts(pair)[0] == every[3]
    assert len(texts(pair)) == 2
