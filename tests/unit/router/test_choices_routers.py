"""Several choices beside drains and other routers: claimed, superseded and ended as one request."""

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from disagg.errors import StoppingError, SupersededError
from disagg.router.callers import ANYBODY
from disagg.router.choices import Choices
from disagg.router.dispatch import Dispatcher
from disagg.router.generation_request import GenerationRequest
from disagg.router.observed_call import ObservedCall
from disagg.router.text_stream import TextReader, next_piece
from tests.unit.router.choices_client import BODY, LONG, PROMPT, alone, ask, texts
from tests.unit.router.test_http_errors import check_error

NAMED = {"x-request-id": "again"}
LIST = {"n": 3, "prompt": [LONG, PROMPT, LONG]}
"""Nine choices; two prompts are equal, and their other choices start later than the third's."""
NUM = 9


@pytest.fixture
async def replicas(open_house):
    """Two routers that share a worker, whose tokens differ from seed to seed."""
    first, second = await open_house(), await open_house()
    worker = await first.add()
    await worker.register(second.app.grpc_port)
    await second.until(lambda: second.app.dispatcher.core.ready, "the worker at the second router")
    return first, second


def post(house, **body):
    whole = BODY | body
    return asyncio.create_task(house.http.post("/v1/completions", json=whole, headers=NAMED))


def feed(worker, num: int) -> None:
    for _ in range(num):
        worker.gate.release()


def names(worker) -> set[str]:
    return {submit.key.request_id for submit in worker.submits}


async def start_all(house, worker, asked) -> None:
    """Let every choice start, and none of them end."""
    first = [f"again-{number * 3}" for number in (0, 2)]
    core = house.app.dispatcher.core
    while len(names(worker)) < NUM:
        assert not asked.done(), asked.result().text
        feed(worker, 1)
        await asyncio.sleep(0.005)
    assert all(core.record(name).num_tokens >= 2 for name in first)


async def test_what_is_sent_again_is_served_once_and_equal_prompts_live_together(seeded):
    worker = seeded.workers[0]
    expected = texts(await ask(seeded, **LIST))
    worker.submits.clear()
    worker.gate = asyncio.Semaphore(0)
    body = LIST | {"max_tokens": 30}
    first = post(seeded, **body)
    await start_all(seeded, worker, first)
    before = {submit.key for submit in worker.submits}
    second = post(seeded, **LIST)
    check_error(await first, 409, None, "superseded")
    await worker.until(lambda: before <= {one.key for one in worker.cancels}, "all of the first")
    worker.gate.release()
    feed(worker, 1000)
    answer = await second
    assert answer.status_code == 200, answer.text
    assert texts(answer.json()) == expected
    assert len(worker.submits) == 2 * NUM
    await seeded.until(lambda: not seeded.app.dispatcher.core.num_live, "nothing lives")
    assert not len(seeded.app.dispatcher.open_answers)


async def test_what_is_sent_again_before_its_choices_have_started_is_served_once(seeded):
    """The first request starts nothing more, though its tokens have come."""
    worker = seeded.workers[0]
    worker.gate = asyncio.Semaphore(0)
    first = post(seeded, n=3, prompt=LONG, max_tokens=20)
    await worker.until(lambda: worker.submits, "the first choice")
    second = post(seeded, n=3, prompt=LONG)
    check_error(await first, 409, None, "superseded")
    feed(worker, 1000)
    answer = await second
    assert answer.status_code == 200, answer.text
    assert len(worker.submits) == 1 + 3
    worker.gate = None
    assert texts(answer.json()) == [
        await alone(seeded, prompt=LONG, seed=40 + nth) for nth in range(3)
    ]


def call_at(dispatcher):
    span = dispatcher.observers.spans.call("POST /v1/completions", "text_completion", {})
    return ObservedCall(dispatcher.observers, "", span)


async def test_what_is_superseded_starts_nothing_though_its_tokens_wait_to_be_read(
    seeded, monkeypatch
):
    """Its other choices would take the place of those that the client waits for."""
    worker, dispatcher = seeded.workers[0], seeded.app.dispatcher
    worker.gate = asyncio.Semaphore(0)
    wanted = GenerationRequest("tiny", tuple(LONG), "prompt", max_tokens=6, seed=40)
    prompt = await seeded.app._preparation.prepare(wanted, "again", ANYBODY, 0)
    reads = asyncio.Event()

    async def late(stream, reader):
        await reads.wait()
        return await next_piece(stream, reader)

    async def to_end(choices):
        return [index async for index, piece in choices.pieces() if piece.finish_reason]

    monkeypatch.setattr("disagg.router.choices.next_piece", late)
    texts = partial(TextReader, tokenizer=seeded.tokenizer)
    first = Choices(dispatcher, [prompt], 3, texts, call_at(dispatcher))
    await first.start()
    reading = asyncio.create_task(to_end(first))
    await worker.until(lambda: worker.submits, "the first choice")
    feed(worker, 2)
    await seeded.until(lambda: dispatcher.core.record("again-0").num_tokens == 2, "its tokens")
    monkeypatch.undo()
    second = Choices(dispatcher, [prompt], 3, texts, call_at(dispatcher))
    await second.start()
    served = asyncio.create_task(to_end(second))
    await worker.until(lambda: len(worker.submits) == 2 and worker.cancels, "it in its place")
    feed(worker, 2)
    await worker.until(lambda: len(worker.submits) == 4, "the second one's choices")
    reads.set()
    with pytest.raises(SupersededError):
        await reading
    feed(worker, 100)
    assert sorted(await served) == [0, 1, 2]
    assert len(worker.submits) == 4


@pytest.mark.parametrize("started", [False, True])
async def test_what_is_sent_again_at_another_replica_is_served_once(replicas, started):
    a, b = replicas
    worker = a.workers[0]
    worker.gate = asyncio.Semaphore(0)
    first = post(a, **LIST, max_tokens=30)
    if started:
        await start_all(a, worker, first)
    else:
        await worker.until(lambda: len(worker.submits) == 5, "what starts at once")
    second = post(b, **LIST)
    check_error(await first, 409, None, "superseded")
    await a.until(lambda: not a.app.dispatcher.core.num_live, "the first router to be done")
    feed(worker, 1000)
    answer = await second
    assert answer.status_code == 200, answer.text
    assert len(texts(answer.json())) == NUM
    assert answer.json()["usage"]["completion_tokens"] == NUM * BODY["max_tokens"]


@pytest.mark.parametrize("other", [[LONG, [9, 9], LONG], [LONG, PROMPT, [9, *LONG]]])
async def test_a_list_with_another_prompt_is_another_request(seeded, other):
    """It is refused, and the one that lives is whole."""
    worker = seeded.workers[0]
    worker.gate = asyncio.Semaphore(0)
    first = post(seeded, **LIST)
    await worker.until(lambda: len(worker.submits) == 5, "what starts at once")
    refused = await post(seeded, **LIST | {"prompt": other})
    check_error(refused, 409, "request_id", "duplicate_request_id")
    feed(worker, 1000)
    answer = await first
    assert answer.status_code == 200, answer.text
    assert len(texts(answer.json())) == NUM


async def test_claims_of_choices_differ_and_are_those_of_the_request_sent_again(seeded):
    claims: list[bytes] = []
    generate = Dispatcher.generate

    def noted(self, request, *more, **options):
        claims.append(request.claim)
        return generate(self, request, *more, **options)

    bodies: list[dict[str, Any]] = [
        {"prompt": [PROMPT, PROMPT]},
        {"prompt": [PROMPT, PROMPT], "seed": 3},
        {"prompt": [PROMPT, [6, 5]]},
        {"n": 2},
        {},
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "generate", noted)
        for body in bodies:
            await post(seeded, **body)
    pairs = [claims[at : at + 2] for at in range(0, 8, 2)]
    assert pairs[0] == pairs[1]
    assert len({claim for pair in pairs[1:] for claim in pair}) == 6
    # One answer and several to the same prompt are the same request.
    assert claims[8] == pairs[3][0]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_drain_between_the_first_choice_and_the_others_cuts_nothing(seeded, streamed):
    worker = seeded.workers[0]
    body = {"n": 3, "prompt": LONG}
    expected = texts(await ask(seeded, **body))
    worker.submits.clear()
    worker.gate = asyncio.Semaphore(0)
    asked = post(seeded, **body, stream=streamed)
    await worker.until(lambda: worker.submits, "the first choice")
    drain = asyncio.create_task(seeded.app.drain())
    await seeded.until(lambda: seeded.app.dispatcher.draining, "draining")
    assert len(worker.submits) == 1
    feed(worker, 1000)
    answer = await asked
    assert answer.status_code == 200, answer.text
    await drain
    if not streamed:
        assert texts(answer.json()) == expected
        return
    *events, done = (line[6:] for line in answer.text.splitlines() if line)
    assert done == "[DONE]"
    found = ["", "", ""]
    for event in events:
        (choice,) = json.loads(event)["choices"]
        found[choice["index"]] += choice["text"]
    assert found == expected


async def test_a_drain_waits_for_an_answer_that_a_stop_string_ended(seeded):
    """All choices have ended at the workers, none of it is sent yet."""
    worker = seeded.workers[0]
    text = await alone(seeded)
    worker.gate = asyncio.Semaphore(0)
    asked = post(seeded, n=2, stop=[text[2]])
    await worker.until(lambda: len(worker.submits) == 3, "both choices")
    streams = [one.stream for one in seeded.app.dispatcher._live]
    streams[0].cancel("stop string")
    assert len(seeded.app.dispatcher.open_answers) == 2
    streams[0].cancel("client left")
    assert len(seeded.app.dispatcher.open_answers) == 1
    asked.cancel()


async def test_beyond_its_time_a_drain_ends_all_choices_with_an_error(open_house):
    """Control: what was accepted does not start for ever."""
    house = await open_house(drain_timeout_ms=50)
    worker = await house.add(gate=asyncio.Semaphore(0))
    asked = post(house, n=3, prompt=LONG)
    await worker.until(lambda: worker.submits, "the first choice")
    await house.app.drain()
    await house.app.stop()
    check_error(await asked, 503, None, StoppingError.code)
    assert len(worker.submits) == 1
