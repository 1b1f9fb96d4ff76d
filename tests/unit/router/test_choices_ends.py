"""Several choices end together: bounds, faults, clients that leave or read nothing."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from disagg.messages.outputs import FinishReason, SequenceOutput, StepOutputs
from disagg.messages.session import EndReason, PartEnded
from disagg.messages.submit import Submit
from disagg.testing.scripted_worker import READY
from tests.unit.router.choices_client import (
    BODY,
    CHAT,
    LONG,
    PROMPT,
    alone,
    ask,
    texts,
    token_of,
)
from tests.unit.routing.measured import ALL_STEPS


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


async def test_who_has_begun_is_not_shed_for_choices_that_come_later(open_house):
    """Between its first choice and the others the worker has got more to do than it can in time."""
    measured = replace(READY, step_times=ALL_STEPS)
    busy = replace(measured, num_prefill_tokens_queued=10**8, num_prompts_queued=10**5)
    house = await open_house()
    worker = await house.add(stats=measured)

    def busy_soon(submit: Submit) -> list[Any] | None:
        if submit.sampling.seed != 40:
            return None
        start = len(submit.token_ids)
        first, last = (
            StepOutputs((SequenceOutput(submit.key, start + n, (50,), (), finish),))
            for n, finish in enumerate([FinishReason.NONE, FinishReason.LENGTH])
        )
        return [first, busy, last]

    worker.misbehave = busy_soon
    wants = {"disagg": {"ttft_ms": 600_000, "shed": True}, "prompt": LONG}
    assert len(texts(await ask(house, n=3, **wants))) == 3
    control = await house.http.post("/v1/completions", json=BODY | wants | {"seed": 1})
    assert control.status_code == 429
    assert control.json()["error"]["code"] == "slo_unattainable"


@pytest.mark.parametrize("more", [{"n": 3}, {"n": 3, "prompt": LONG}, {"prompt": [PROMPT] * 3}])
async def test_the_first_choice_alone_can_be_shed(house, more):
    seen, generate = [], house.app.dispatcher.generate

    def keep(new, *arguments, **further):
        seen.append(new.slo)
        return generate(new, *arguments, **further)

    house.app.dispatcher.generate = keep
    await ask(house, disagg={"ttft_ms": 60_000, "shed": True}, **more)
    assert [one.sheds for one in seen] == [True, False, False]
    assert {one.ttft_ms for one in seen} == {60_000}


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


@pytest.mark.parametrize("more", [{"n": 3}, {"n": 3, "prompt": LONG}, {"prompt": [LONG] * 3}])
async def test_all_choices_are_accepted_or_none(open_house, more):
    """Also where most of them would start later than the first one."""
    house = await open_house(requests_max=3)
    worker = await house.add(gate=asyncio.Semaphore(0))
    held = asyncio.create_task(ask(house))
    await worker.until(lambda: worker.submits, "the first request")
    response = await house.http.post("/v1/completions", json=BODY | more)
    assert response.status_code == 429
    assert "limits.requests_max" in response.json()["error"]["message"]
    assert len(worker.submits) == 1
    worker.gate.release()
    for _ in range(5):
        worker.gate.release()
    assert len(texts(await held)) == 1
    worker.gate = None
    assert len(texts(await ask(house, **more))) == 3


async def test_places_of_choices_that_start_later_are_kept(open_house):
    house = await open_house(requests_max=3)
    worker = await house.add(gate=asyncio.Semaphore(0))
    asked = asyncio.create_task(ask(house, n=3, prompt=LONG))
    await worker.until(lambda: worker.submits, "the first choice")
    refused = await house.http.post("/v1/completions", json=BODY)
    assert refused.status_code == 429
    worker.gate.release()
    worker.gate.release()
    await worker.until(lambda: len(worker.submits) == 3, "the others")
    asked.cancel()
    await house.until(lambda: house.app.dispatcher.core.num_live == 0, "all to be ended")
    worker.gate = None
    assert len(texts(await ask(house, n=3))) == 3  # nothing is kept for who left


async def test_more_choices_than_can_ever_live_are_refused_for_good(open_house):
    house = await open_house(requests_max=3)
    worker = await house.add()
    for body, param in (({"n": 4}, "n"), ({"prompt": [PROMPT] * 4}, "prompt")):
        response = await house.http.post("/v1/completions", json=BODY | body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert "limits.requests_max" in error["message"]
    assert worker.submits == []


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
    refused: list[tuple[dict[str, Any], str]] = [
        ({"n": 5}, "n"),
        ({"best_of": 5}, "best_of"),
        ({"prompt": [PROMPT] * 5}, "prompt"),
        ({"prompt": [PROMPT] * 3, "n": 2}, "prompt"),
    ]
    for body, param in refused:
        response = await house.http.post("/v1/completions", json=BODY | body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
    assert worker.submits == []
    assert len(texts(await ask(house, prompt=[PROMPT] * 2, n=2))) == 4


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
