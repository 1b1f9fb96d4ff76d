"""Several choices of one request: prompts in a list, `n`, `best_of`."""

import asyncio
import json
from typing import Any

import pytest

from disagg.messages.outputs import FinishReason, SequenceOutput, StepOutputs
from disagg.messages.sampling import TokenLogprobs
from disagg.messages.session import EndReason, PartEnded, Submit
from disagg.testing.scripted_worker import BLOCK_TOKENS

PROMPT = [5, 6]
LONG = list(range(10, 10 + BLOCK_TOKENS + 2))
"""It fills a block."""
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "seed": 40}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def token_of(submit: Submit):
    """Another printable token at each place of each seed."""
    return lambda position: 40 + (position + 7 * submit.sampling.seed) % 50


@pytest.fixture
async def seeded(house):
    house.workers[0].token_of = token_of
    return house


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


@pytest.mark.parametrize(
    "prompts",
    [["the cat", "on the mat", "ran"], [[5, 6], [7, 8, 9], [10]], [LONG, PROMPT], ["a", [5]]],
)
async def test_each_of_several_prompts_is_answered_as_if_it_were_sent_alone(seeded, prompts):
    single = [await ask(seeded, prompt=prompt) for prompt in prompts]
    expected = [one["choices"][0]["text"] for one in single]
    assert len(set(expected)) > 1
    answer = await ask(seeded, prompt=prompts)
    assert texts(answer) == expected
    assert texts_of(await stream(seeded, prompt=prompts), len(prompts)) == expected
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][field] == sum(one["usage"][field] for one in single)
    assert texts(await ask(seeded, prompt=prompts[:1])) == expected[:1]


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


async def test_one_choice_that_fails_ends_all(house):
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(0)
    keys = {}

    def fails(submit: Submit) -> list[Any] | None:
        keys[submit.sampling.seed] = submit.key
        if submit.sampling.seed != 41:
            return None
        return [PartEnded(submit.key, EndReason.NO_TOKEN, "no token can follow")]

    worker.misbehave = fails
    response = await house.http.post("/v1/completions", json=BODY | {"n": 3})
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith("no token can follow")
    cancelled = lambda: {cancel.key for cancel in worker.cancels}  # noqa: E731
    await worker.until(lambda: {keys[40], keys[42]} <= cancelled(), "the others to be ended")
    await house.until(lambda: house.app.dispatcher.core.num_live == 0, "nothing lives")


async def test_one_choice_that_fails_in_a_stream_ends_it_with_an_error(house):
    worker = house.workers[0]
    worker.token_of = token_of

    def fails(submit: Submit) -> list[Any] | None:
        if submit.sampling.seed != 42:
            return None
        start = len(submit.token_ids)
        first = SequenceOutput(submit.key, start, (50,), (), FinishReason.NONE)
        return [StepOutputs((first,)), PartEnded(submit.key, EndReason.NO_TOKEN, "no more")]

    worker.misbehave = fails
    body = BODY | {"n": 3, "stream": True, "max_tokens": 300}
    async with house.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line async for line in response.aiter_lines() if line]
    if response.status_code == 200:  # else it failed before any token
        assert "data: [DONE]" not in lines
        assert "no more" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    else:
        assert "no more" in lines[-1]
    await house.until(lambda: house.app.dispatcher.core.num_live == 0, "nothing lives")


@pytest.mark.parametrize("prompt", [PROMPT, LONG])
async def test_a_client_that_leaves_ends_all_choices_and_starts_none(house, prompt):
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(0)
    request = asyncio.create_task(
        house.http.post("/v1/completions", json=BODY | {"n": 3, "prompt": prompt})
    )
    num = 3 if prompt is PROMPT else 1
    await worker.until(lambda: len(worker.submits) == num, "what starts at once")
    request.cancel()
    await worker.until(lambda: len(worker.cancels) == num, "cancels")
    for _ in range(12):
        worker.gate.release()
    await house.until(lambda: house.app.dispatcher.core.num_live == 0, "nothing lives")
    assert len(texts(await ask(house))) == 1  # it has heard of nothing else before this
    assert len(worker.submits) == num + 1


async def test_all_choices_are_accepted_or_none(open_house):
    house = await open_house(requests_max=3)
    worker = await house.add(gate=asyncio.Semaphore(0))
    for body in ({"n": 4}, {"prompt": [PROMPT] * 4}):
        response = await house.http.post("/v1/completions", json=BODY | body)
        assert response.status_code == 429
        await house.until(lambda: house.app.dispatcher.core.num_live == 0, "nothing lives")
    worker.gate = None
    assert len(texts(await ask(house, n=3))) == 3


async def test_the_tokens_of_all_choices_are_bounded(open_house):
    house = await open_house(generation_tokens_max=40)
    worker = await house.add()
    for more in ({"n": 5}, {"prompt": [PROMPT] * 5}):
        body = BODY | {"max_tokens": 9} | more
        response = await house.http.post("/v1/completions", json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "max_tokens"
        assert "limits.generation_tokens_max" in error["message"]
    assert worker.submits == []
    # What is not given is what is left for each.
    answer = await ask(house, "chat/completions", **CHAT | {"n": 5})
    assert answer["usage"]["completion_tokens"] <= 40
    assert {submit.sampling.max_tokens for submit in worker.submits} == {8}


async def test_a_client_that_does_not_read_ends_all_choices(open_house):
    """What it does not read is bounded for each of them, as for one."""
    house = await open_house(unread_tokens_max=50, send_buffer_bytes=4096, send_timeout_ms=120_000)
    await house.add(max_model_tokens=100_000)
    body = json.dumps(BODY | {"n": 3, "stream": True, "max_tokens": 50_000}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: slow\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection("127.0.0.1", house.app.http_port, limit=1024)
    try:
        writer.write(head.encode() + body)
        core = house.app.dispatcher.core
        await house.until(lambda: core.num_live == 3, "all choices")
        await house.until(lambda: core.num_live == 0, "all to be ended")
        errors = {core.record(f"slow-{index}").error for index in range(3)}
        assert "the client reads too slowly" in errors
    finally:
        writer.close()


async def test_the_number_of_choices_is_bounded(open_house):
    house = await open_house(choices_max=4)
    worker = await house.add()
    for body, param in [
        ({"n": 5}, "n"),
        ({"best_of": 5}, "best_of"),
        ({"prompt": [PROMPT] * 5}, "prompt"),
        ({"prompt": [PROMPT] * 3, "n": 2}, "prompt"),
    ]:
        response = await house.http.post("/v1/completions", json=BODY | body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
    assert worker.submits == []
    assert len(texts(await ask(house, prompt=[PROMPT] * 2, n=2))) == 4


async def test_a_bad_prompt_is_named_by_its_place_and_none_is_started(house):
    for prompts, param in [
        ([PROMPT, []], "prompt[1]"),
        (["a", ""], "prompt[1]"),
        ([PROMPT, [320]], "prompt[1]"),
        ([[5] * 600, PROMPT], "prompt[0]"),
    ]:
        response = await house.http.post("/v1/completions", json=BODY | {"prompt": prompts})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
    assert house.workers[0].submits == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_choice_begins_with_the_text_of_its_own_prompt(seeded, streamed):
    prompts = ["the cat", "on the mat"]
    plain = texts(await ask(seeded, prompt=prompts, n=2))
    expected = [prompts[index // 2] + text for index, text in enumerate(plain)]
    if streamed:
        found = texts_of(await stream(seeded, prompt=prompts, n=2, echo=True), 4)
    else:
        found = texts(await ask(seeded, prompt=prompts, n=2, echo=True))
    assert found == expected


async def test_choices_go_on_elsewhere_with_their_own_seeds(open_house):
    house = await open_house()
    gates = [asyncio.Semaphore(0), asyncio.Semaphore(0)]
    workers = [await house.add(f"w{i}", gate=gate) for i, gate in enumerate(gates)]
    for worker in workers:
        worker.token_of = token_of
    request = asyncio.create_task(ask(house, n=3, max_tokens=12))
    await house.until(lambda: sum(len(w.submits) for w in workers) == 3, "all choices")
    lost = max(workers, key=lambda worker: len(worker.submits))
    for gate in gates:
        for _ in range(6):
            gate.release()
    await lost.until(lambda: lost.num_sent >= 3, "tokens before the loss")
    await lost.stop()
    for gate in gates:
        for _ in range(100):  # more than what is left, and the questions below
            gate.release()
    answer = await request
    (other,) = [worker for worker in workers if worker is not lost]
    assert texts(answer) == [await alone(house, seed=40 + nth, max_tokens=12) for nth in range(3)]
    moved = {submit.key.request_id: submit for submit in lost.submits}
    again = [s for s in other.submits if s.key.request_id in moved]
    assert len(again) == len(moved) > 0
    for submit in again:
        before = moved[submit.key.request_id]
        assert submit.sampling.seed == before.sampling.seed
        assert submit.token_ids[: len(before.token_ids)] == before.token_ids
        assert submit.sampling.num_prompt_tokens == 2
