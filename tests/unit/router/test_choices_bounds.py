"""What several choices of one request may take: of memory, places and keys."""

import asyncio
from typing import Any

import pytest

from disagg.messages.submit import Submit
from tests.unit.router.choices_client import BODY, CHAT, LONG, PROMPT, ask, stream, texts
from tests.unit.router.message_examples import BODY as TOOL_BODY
from tests.unit.router.message_examples import CALL
from tests.unit.router.test_http_errors import check_error
from tests.unit.router.test_limits import MANY, never_reads

UNREAD = 50


async def taken_for_nobody(open_house, num: int) -> int:
    """Tokens that were taken for a client that reads nothing, until it was given up."""
    house = await open_house(unread_tokens_max=UNREAD, send_buffer_bytes=4096)
    worker = await house.add(max_model_tokens=2 * MANY, gate=asyncio.Semaphore(0))
    body = BODY | {"n": num, "stream": True, "max_tokens": MANY, "logprobs": 5}
    client = never_reads(house, b"/v1/completions", body)
    try:
        await worker.until(lambda: len(worker.submits) == num, "all choices")
        core = house.app.dispatcher.core
        names = [submit.key.request_id for submit in worker.submits]
        num_fed = 0

        def num_taken() -> int:
            return sum(core.record(name).num_tokens for name in names)

        while core.num_live:
            assert core.num_live == num, "all end together"
            num_fed += 1
            worker.gate.release()
            await house.until(
                lambda fed=num_fed: core.num_live < num or num_taken() >= fed, f"token {num_fed}"
            )
        await worker.until(lambda: len(worker.cancels) == num, "cancels of all choices")
        reasons = {core.record(name).error for name in names}
        assert reasons == {"the client reads too slowly"}
        return num_taken()
    finally:
        client.close()


async def test_what_a_client_does_not_read_is_bounded_for_all_choices_together(open_house):
    alone = await taken_for_nobody(open_house, 1)
    together = await taken_for_nobody(open_house, 32)
    # Beside the buffers of the network, which are the same: a bound for each would be 32 times it.
    assert together < alone + 4 * UNREAD


async def test_a_client_that_reads_gets_more_choices_than_tokens_may_wait(open_house):
    """Control: what all of them bring at once is not what waits for a slow client."""
    house = await open_house(unread_tokens_max=UNREAD, requests_max=100)
    await house.add(tokens_per_step=2)
    answer = await ask(house, n=40, max_tokens=60)
    assert answer["usage"]["completion_tokens"] == 40 * 60
    chunks = await stream(house, n=40, max_tokens=60)
    assert sum(one["choices"][0]["finish_reason"] is not None for one in chunks) == 40


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_disconnects_ends_all_its_choices_at_the_workers(open_house, streamed):
    house = await open_house()
    workers = [await house.add(f"w{n}", gate=asyncio.Semaphore(0)) for n in range(2)]
    body = BODY | {"n": 16, "stream": streamed}
    asked = asyncio.create_task(house.http.post("/v1/completions", json=body))

    def submitted() -> set[Any]:
        return {submit.key for worker in workers for submit in worker.submits}

    await house.until(lambda: len(submitted()) == 16, "all choices")
    if streamed:
        for worker in workers:
            worker.gate.release()
        await house.until(lambda: sum(w.num_sent for w in workers) == 2, "a token")
    asked.cancel()
    for worker in workers:
        keys = {submit.key for submit in worker.submits}
        await worker.until(
            lambda worker=worker, keys=keys: {one.key for one in worker.cancels} == keys,
            "its cancels",
        )
    assert not house.app.dispatcher.core.num_live
    assert not len(house.app.dispatcher.open_answers)


async def test_a_request_of_several_choices_is_one_of_its_key(open_house):
    house = await open_house(streams_per_key_max=2)
    worker = await house.add(gate=asyncio.Semaphore(0))
    held = [asyncio.create_task(ask(house, n=3)) for _ in range(2)]
    await worker.until(lambda: len(worker.submits) == 6, "both")
    refused = await house.http.post("/v1/completions", json=BODY)
    check_error(refused, 429, None, "rate_limit_exceeded")
    assert "limits.streams_per_key_max" in refused.text
    for _ in range(100):
        worker.gate.release()
    assert [len(texts(await one)) for one in held] == [3, 3]
    assert len(texts(await ask(house))) == 1


async def test_log_probabilities_of_a_list_that_can_never_be_kept_are_refused_for_good(open_house):
    house = await open_house(prompt_logprobs_max=4)
    worker = await house.add()
    body = {"prompt_logprobs": 0, "max_tokens": 1}
    for prompts, status in (([PROMPT] * 17, 400), ([PROMPT] * 16, 200)):
        answer = await house.http.post("/v1/completions", json=BODY | body | {"prompt": prompts})
        assert answer.status_code == status, answer.text
        if status == 400:
            check_error(answer, 400, "prompt_logprobs", "invalid_value")
            assert "limits.prompt_logprobs_max" in answer.text
            assert worker.submits == []


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_every_choice_shows_the_log_probabilities_of_its_prompt(seeded, streamed, max_tokens):
    """They are computed once for each prompt."""
    worker = seeded.workers[0]
    prompts = [LONG, PROMPT]
    body = {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
    single = [
        (await ask(seeded, prompt=prompt, seed=40 + nth, **body))["choices"][0]["logprobs"]
        for prompt in prompts
        for nth in range(2)
    ]
    worker.submits.clear()
    if streamed:
        found: list[dict[str, list[Any]]] = [{}, {}, {}, {}]
        for chunk in await stream(seeded, prompt=prompts, n=2, **body):
            (choice,) = chunk["choices"]
            for name, values in (choice["logprobs"] or {}).items():
                found[choice["index"]].setdefault(name, []).extend(values)
    else:
        answer = await ask(seeded, prompt=prompts, n=2, **body)
        found = [choice["logprobs"] for choice in answer["choices"]]
    assert found == single
    assert [len(one["tokens"]) for one in found[::2]] == [len(p) + max_tokens for p in prompts]

    def scored(submit: Submit) -> bool:
        return submit.sampling.num_prompt_logprobs is not None

    assert sum(scored(submit) for submit in worker.submits) == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_choice_of_a_chat_has_calls_of_its_own(serve, streamed):
    house = await serve(f"So.\n{CALL}")
    body = TOOL_BODY | {"n": 3, "max_tokens": 200, "seed": 1}
    calls: list[list[Any]] = [[], [], []]
    contents, reasons = ["", "", ""], [None] * 3
    if streamed:
        for chunk in await stream(house, "chat/completions", **body):
            (choice,) = chunk["choices"]
            index, delta = choice["index"], choice["delta"]
            contents[index] += delta.get("content") or ""
            calls[index] += [call for call in delta.get("tool_calls", []) if call.get("id")]
            reasons[index] = choice["finish_reason"] or reasons[index]
    else:
        answer = await ask(house, "chat/completions", **body)
        for choice in answer["choices"]:
            contents[choice["index"]] = choice["message"]["content"]
            calls[choice["index"]] = choice["message"]["tool_calls"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert contents == ["So.\n"] * 3
    assert reasons == ["tool_calls"] * 3
    assert [len(one) for one in calls] == [1, 1, 1]
    assert len({call["id"] for one in calls for call in one}) == 3


async def test_an_id_as_long_as_it_may_be_and_one_that_a_choice_of_another_request_has(house):
    name = "x" * 128
    for request_id, num in ((name, 3), (name, 1)):
        headers = {"x-request-id": request_id}
        answer = await house.http.post("/v1/completions", json=BODY | {"n": num}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-request-id"] == name
    record = await house.admin.get(f"/v1/disagg/requests/{name}-2")
    assert record.json()["outcome"] == "length"
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(0)
    num = len(worker.submits)
    held = asyncio.create_task(
        house.http.post("/v1/completions", json=BODY | {"n": 3}, headers={"x-request-id": "a"})
    )
    await worker.until(lambda: len(worker.submits) == num + 3, "all choices")
    other = await house.http.post(
        "/v1/completions", json=BODY | {"prompt": [9]}, headers={"x-request-id": "a-1"}
    )
    check_error(other, 409, "request_id", "duplicate_request_id")
    for _ in range(100):
        worker.gate.release()
    assert (await held).status_code == 200


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("completions", {"n": 2**31 - 1}, "n"),
        ("completions", {"n": 2**31}, "n"),
        ("completions", {"n": 1.0}, "n"),
        ("completions", {"n": -1}, "n"),
        ("completions", {"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ("completions", {"prompt": ["a"] * 100_000}, "prompt"),
        ("completions", {"prompt": [["a"]]}, "prompt"),
        ("completions", {"prompt": [[5, [6]]]}, "prompt"),
        ("completions", {"prompt": [[5], 6]}, "prompt"),
        ("completions", {"prompt": [[]]}, "prompt"),
        ("completions", {"prompt": [None]}, "prompt"),
        ("completions", {"prompt": {"0": "a"}}, "prompt"),
        ("completions", {"prompt": [[5], [320]], "n": 2}, "prompt[1]"),
        ("completions", {"priority": -(2**63) - 1}, "priority"),
        ("completions", {"priority": True}, "priority"),
        ("completions", {"max_tokens": 0, "n": 2}, "max_tokens"),
        ("chat/completions", {"n": 2, "prompt": ["a", "b"]}, "prompt"),
        ("responses", {"n": 2, "input": "hi"}, "n"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name_and_starts_nothing(
    house, path, change, param
):
    bodies = {"completions": BODY, "chat/completions": CHAT, "responses": {"model": "tiny"}}
    answer = await house.http.post(f"/v1/{path}", json=bodies[path] | change)
    check_error(answer, 400, param, "invalid_value")
    assert house.workers[0].submits == []


@pytest.mark.parametrize("priority", [-(2**63), 2**63 - 1, 0])
async def test_the_bounds_of_a_priority_hold_for_all_choices(house, priority):
    assert len(texts(await ask(house, n=2, priority=priority, prompt=LONG))) == 2
