"""`prompt_logprobs` and `echo`: log-probabilities of a prompt, in vLLM's form and in OpenAI's."""

import asyncio
from typing import Any

import pytest

from disagg.messages.submit import Role
from disagg.router.chat import Chat
from disagg.testing.scripted_worker import prompt_logprobs_of
from tests.unit.router.test_generation import chunks_of
from tests.unit.router.test_http_errors import check_error

TEXT_PROMPT = "the cat"


def body_of(house, **more):
    return {"model": "tiny", "prompt": TEXT_PROMPT, "max_tokens": 3} | more


async def add(house, **more):
    """A worker whose script begins after the prompt; and the prompt's tokens."""
    tokens = house.tokenizer.encode(TEXT_PROMPT)
    await house.add(prompt=len(tokens), **more)
    return tokens


def name(house, token_id):
    return house.tokenizer.token_bytes(token_id).decode(errors="replace")


def entries_of(house, tokens, number):
    """What vLLM would answer, of the scripted worker's numbers."""
    shown: list[Any] = [None]
    for at, token in enumerate(tokens[1:], 1):
        score = prompt_logprobs_of(at, number)
        entry = {"logprob": score.logprob, "rank": score.rank, "decoded_token": name(house, token)}
        best = {
            str(i): {"logprob": value, "rank": rank, "decoded_token": name(house, i)}
            for rank, (i, value) in enumerate(score.top, 1)
        }
        shown.append({str(token): entry} | best)
    return shown


@pytest.mark.parametrize("number", [0, 2])
async def test_completions(open_house, number):
    house = await open_house()
    tokens = await add(house)
    response = await house.http.post("/v1/completions", json=body_of(house, prompt_logprobs=number))
    (choice,) = response.json()["choices"]
    assert choice["prompt_logprobs"] == entries_of(house, tokens, number)
    assert choice["text"] == house.tokenizer.decode(house.script[:3])
    assert choice["logprobs"] is None
    plain = await house.http.post("/v1/completions", json=body_of(house))
    assert "prompt_logprobs" not in plain.json()["choices"][0]


async def test_chat(open_house):
    house = await open_house()
    tokens = house.tokenizer.encode_chat(Chat(({"role": "user", "content": "hi"},)))
    await house.add(prompt=len(tokens))
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "prompt_logprobs": 1,
    }
    answer = (await house.http.post("/v1/chat/completions", json=body)).json()
    assert answer["prompt_logprobs"] == entries_of(house, tokens, 1)
    assert answer["choices"][0]["message"]["content"] == house.tokenizer.decode(house.script[:3])
    none = (await house.http.post("/v1/chat/completions", json=body | {"max_tokens": 0})).json()
    assert none["prompt_logprobs"] == answer["prompt_logprobs"]
    assert none["choices"][0]["message"]["content"] == ""
    assert none["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
async def test_echo_with_logprobs(open_house, stream, max_tokens):
    house = await open_house()
    tokens = await add(house)
    body = body_of(house, echo=True, logprobs=1, max_tokens=max_tokens)
    if stream:
        chunks = await chunks_of(house, "/v1/completions", body)
        assert chunks.pop() == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        assert choices[0]["text"].startswith(TEXT_PROMPT)
        text = "".join(choice["text"] for choice in choices)
        shown: Any = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for choice in choices:
            for key, values in (choice["logprobs"] or {}).items():
                shown[key] += values
        reason = choices[-1]["finish_reason"]
    else:
        answer = (await house.http.post("/v1/completions", json=body)).json()
        (choice,) = answer["choices"]
        text, shown, reason = choice["text"], choice["logprobs"], choice["finish_reason"]
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert answer["usage"]["prompt_tokens"] == len(tokens)
    own = house.script[:max_tokens]
    assert text == TEXT_PROMPT + house.tokenizer.decode(own)
    assert reason == "length"
    assert shown["tokens"] == [name(house, token) for token in (*tokens, *own)]
    expected = [prompt_logprobs_of(at, 1) for at in range(1, len(tokens))]
    values = [None, *(one.logprob for one in expected), *[-0.5] * max_tokens]
    assert shown["token_logprobs"] == values
    tops = shown["top_logprobs"]
    assert tops[0] is None
    for token, top, score in zip(tokens[1:], tops[1 : len(tokens)], expected, strict=True):
        assert top == {name(house, token): score.logprob, name(house, 10): -0.5}
    # Offsets point into the text: <bos> has no place in it.
    for token, at in list(zip(shown["tokens"], shown["text_offset"], strict=True))[1:]:
        assert text[at:].startswith(token)
    if not stream:
        assert loglikelihood(choice, len(tokens) - 2) == pytest.approx(
            sum(values[len(tokens) - 2 : -1])
        )


@pytest.mark.parametrize("skip", [True, False])
async def test_offsets_of_an_echoed_text_with_special_tokens_in_it(open_house, skip):
    house = await open_house()
    special = house.tokenizer.token_bytes(house.tokenizer.eos_token_ids[0]).decode()
    prompt = f"a{special}b c"
    tokens = house.tokenizer.encode(prompt)
    assert house.tokenizer.eos_token_ids[0] in tokens
    await house.add(prompt=len(tokens))
    body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2}
    body["skip_special_tokens"] = skip
    (choice,) = (await house.http.post("/v1/completions", json=body)).json()["choices"]
    shown = choice["logprobs"]
    places = dict(zip(shown["tokens"][: len(tokens)], shown["text_offset"], strict=False))
    assert places[special] == 1
    assert places["b"] == 1 + len(special)
    assert shown["text_offset"][len(tokens)] == len(prompt)
    answer = await house.http.post("/v1/completions", json=body | {"prompt": list(tokens)})
    (of_ids,) = answer.json()["choices"]
    decode = house.tokenizer.decode if skip else house.tokenizer.decode_all
    assert of_ids["text"].startswith(decode(tokens))
    assert of_ids["logprobs"]["text_offset"][len(tokens)] == len(decode(tokens))


def loglikelihood(choice, num_context):
    """As lm-eval's ``LocalCompletionsAPI.parse_logprobs`` reads an answer."""
    logprobs = choice["logprobs"]["token_logprobs"][num_context:-1]
    tops = choice["logprobs"]["top_logprobs"][num_context:-1]
    assert all(max(top.values()) >= value for top, value in zip(tops, logprobs, strict=True))
    return sum(logprobs)


async def test_echo_of_tokens_and_without_logprobs(open_house):
    house = await open_house()
    tokens = await add(house)
    for prompt in (TEXT_PROMPT, list(tokens)):
        for max_tokens in (0, 3):
            body = body_of(house, prompt=prompt, echo=True, max_tokens=max_tokens)
            answer = (await house.http.post("/v1/completions", json=body)).json()
            (choice,) = answer["choices"]
            own = house.tokenizer.decode(house.script[:max_tokens])
            assert choice["text"] == TEXT_PROMPT + own
            assert choice["logprobs"] is None
            assert house.workers[0].submits[-1].sampling.num_prompt_logprobs is None
            assert house.workers[0].submits[-1].sampling.max_tokens == max(1, max_tokens)
    plain = await house.http.post("/v1/completions", json=body_of(house, max_tokens=0))
    check_error(plain, 400, "max_tokens", "invalid_value")


async def test_both_at_once_get_as_many_as_each_asks_for(open_house):
    house = await open_house()
    tokens = await add(house)
    body = body_of(house, echo=True, logprobs=1, prompt_logprobs=3)
    (choice,) = (await house.http.post("/v1/completions", json=body)).json()["choices"]
    assert house.workers[0].submits[-1].sampling.num_prompt_logprobs == 3
    assert choice["prompt_logprobs"] == entries_of(house, tokens, 3)
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1 : len(tokens)]} == {2}


async def test_from_a_prefill_and_a_decode_worker(open_house):
    house = await open_house()
    tokens = house.tokenizer.encode(TEXT_PROMPT)
    await house.add("p", prompt=len(tokens), role="prefill")
    await house.add("d", prompt=len(tokens), role="decode")
    body = body_of(house, prompt_logprobs=1, max_tokens=5)
    for _ in range(5):  # whose stream is first is not said
        (choice,) = (await house.http.post("/v1/completions", json=body)).json()["choices"]
        assert choice["prompt_logprobs"] == entries_of(house, tokens, 1)
        assert choice["text"] == house.tokenizer.decode(house.script[:5])
    assert {w.submits[-1].role for w in house.workers} == {Role.PREFILL, Role.DECODE}


async def test_a_stream_has_no_prompt_logprobs(house):
    body = body_of(house, prompt_logprobs=1, stream=True)
    check_error(
        await house.http.post("/v1/completions", json=body), 400, "prompt_logprobs", "invalid_value"
    )
    assert house.workers[0].submits == []


async def test_too_many_are_refused_by_name(open_house):
    house = await open_house(prompt_logprobs_max=20)
    tokens = await add(house)
    fits = 20 // len(tokens) - 1
    for field, more in (
        ("prompt_logprobs", {"prompt_logprobs": fits + 1}),
        ("logprobs", {"logprobs": fits + 1, "echo": True}),
    ):
        response = await house.http.post("/v1/completions", json=body_of(house, **more))
        check_error(response, 400, field, "invalid_value")
        assert "limits.prompt_logprobs_max=20" in response.text
    assert house.workers[0].submits == []
    good = await house.http.post("/v1/completions", json=body_of(house, prompt_logprobs=fits))
    assert good.is_success
    without = await house.http.post("/v1/completions", json=body_of(house, logprobs=fits + 1))
    assert without.is_success


async def test_all_requests_together_are_bounded(open_house):
    gate = asyncio.Semaphore(0)
    house = await open_house(prompt_logprobs_max=10)
    tokens = await add(house, gate=gate)
    number = 10 // len(tokens) - 1
    body = body_of(house, prompt_logprobs=number)
    fitting = 8 * 10 // (len(tokens) * (1 + number))
    live = [
        asyncio.create_task(house.http.post("/v1/completions", json=body)) for _ in range(fitting)
    ]
    worker = house.workers[0]
    await worker.until(lambda: len(worker.submits) == fitting, "the requests to live")
    refused = await house.http.post("/v1/completions", json=body)
    check_error(refused, 429, None, "rate_limit_exceeded")
    for _ in range(1000):
        gate.release()
    assert all(answer.is_success for answer in await asyncio.gather(*live))
    assert (await house.http.post("/v1/completions", json=body)).is_success
