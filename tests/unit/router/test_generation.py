"""Answers, streamed and not, of a real router whose worker's tokens are known."""

import asyncio
import json
import math
import socket
import threading

import httpx
import openai
import pytest

from disagg.kv.hashing import tenant_salt
from disagg.messages.sampling import TokenLogprobs
from disagg.router.text_stream import StopMatcher
from disagg.testing import scripted_worker
from disagg.testing.scripted_worker import HASHER
from tests.unit.router.conftest import TEXT
from tests.unit.router.scripted_worker import BOUND_S

PROMPT = [5, 6]
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12}


def client(house):
    return openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0)


async def chunks_of(house, path, body):
    """Parsed SSE data of a stream, [DONE] included."""
    async with house.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_client_completion(house, stream):
    expected = house.tokenizer.decode(house.script[:12])
    async with client(house) as api:
        answer = await api.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=12,
            seed=7,
            presence_penalty=0.5,
            frequency_penalty=-1,
            logit_bias={"9": -100, "5": 2.5},
            extra_body={"min_p": 0.1, "repetition_penalty": 1.2},
            stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )
        if stream:
            chunks = [chunk async for chunk in answer]
            text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
            reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
            assert reasons == [None] * (len(reasons) - 1) + ["length"]
            usage = chunks[-1].usage
            assert all(chunk.usage is None for chunk in chunks[:-1])
        else:
            text, usage = answer.choices[0].text, answer.usage
            assert answer.choices[0].finish_reason == "length"
    assert text == expected
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 12, 14)
    submit = house.workers[0].submits[0]
    assert submit.token_ids == (5, 6)
    sampling = submit.sampling
    assert (sampling.seed, sampling.min_p, sampling.num_prompt_tokens) == (7, 0.1, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1)
    assert sampling.repetition_penalty == 1.2
    assert sampling.logit_bias == ((5, 2.5), (9, -100))
    assert submit.sampling.stop_token_ids == house.tokenizer.eos_token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_client_chat(open_house, stream):
    house = await open_house()
    prompt = house.chat_prompt("hi")
    worker = await house.add(prompt=len(prompt), hit_tokens=4)
    async with client(house) as api:
        answer = await api.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            max_completion_tokens=9,
            logprobs=True,
            top_logprobs=2,
            stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )
        if stream:
            chunks = [chunk async for chunk in answer]
            usage = chunks[-1].usage
            chunks = [chunk for chunk in chunks if chunk.choices]
            assert chunks[0].choices[0].delta.role == "assistant"
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            content = [
                t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content
            ]
            assert chunks[-1].choices[0].finish_reason == "length"
        else:
            text, usage = answer.choices[0].message.content, answer.usage
            content = answer.choices[0].logprobs.content
            assert answer.id.startswith("chatcmpl-")
    ids = house.script[:9]
    assert text == house.tokenizer.decode(ids)
    assert b"".join(bytes(token.bytes) for token in content) == text.encode()
    assert [token.logprob for token in content] == [-0.5] * 9
    assert all(len(token.top_logprobs) == 2 for token in content)
    assert all(token.top_logprobs[0].token == token.token for token in content)
    assert worker.submits[0].token_ids == prompt
    assert worker.submits[0].sampling.num_logprobs == 2
    assert usage.prompt_tokens_details.cached_tokens == 4


async def test_chat_without_max_tokens_may_use_the_rest_of_the_context(open_house):
    house = await open_house()
    worker = await house.add(max_model_tokens=40, prompt=6)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    answer = (await house.http.post("/v1/chat/completions", json=body)).json()
    assert worker.submits[0].sampling.max_tokens == 40 - 6
    assert answer["usage"]["completion_tokens"] == 34
    await house.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
    assert worker.submits[1].sampling.max_tokens == 16


async def test_chat_without_max_tokens_fits_every_worker_of_comparable_size(open_house):
    house = await open_house()
    first = await house.add("w1", max_model_tokens=40, prompt=6)
    second = await house.add("w2", max_model_tokens=44, prompt=6)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    await house.http.post("/v1/chat/completions", json=body)
    assert [s.sampling.max_tokens for w in (first, second) for s in w.submits] == [40 - 6]
    asked = await house.http.post("/v1/chat/completions", json=body | {"max_tokens": 45 - 6})
    assert asked.status_code == 400
    assert "exceed 44" in asked.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(house, stream):
    body = BODY | {"max_tokens": 6, "logprobs": 2}
    if stream:
        parts = [c["choices"][0] for c in (await chunks_of(house, "/v1/completions", body))[:-1]]
    else:
        parts = (await house.http.post("/v1/completions", json=body)).json()["choices"]
    shown = {
        name: [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    text = "".join(part["text"] for part in parts)
    assert "".join(shown["tokens"]) == text
    assert shown["token_logprobs"] == [-0.5] * 6
    assert all(len(top) == 2 for top in shown["top_logprobs"])
    starts = [
        text[offset:].startswith(token)
        for offset, token in zip(shown["text_offset"], shown["tokens"], strict=True)
    ]
    assert all(starts)
    plain = await house.http.post("/v1/completions", json=BODY | {"max_tokens": 6})
    assert plain.json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_impossible_tokens_stay_valid_json(house, monkeypatch, stream, chat):
    worst = TokenLogprobs(-math.inf, ((5, -math.inf),))
    monkeypatch.setattr(scripted_worker, "logprobs_of", lambda token_id, num: worst)
    body = {"model": "tiny", "max_tokens": 2, "stream": stream}
    if chat:
        messages = [{"role": "user", "content": "hi"}]
        body |= {"messages": messages, "logprobs": True, "top_logprobs": 1}
    else:
        body |= {"prompt": PROMPT, "logprobs": 1}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    text = (await house.http.post(path, json=body)).text
    assert "-9999.0" in text
    assert "Infinity" not in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_step", [1, 7])
@pytest.mark.parametrize("stop", ["the mat", ["zzz", " on"], "sat on the ma"])
async def test_stop_strings_cut_the_text_and_cancel_the_worker(
    open_house, stream, tokens_per_step, stop
):
    house = await open_house()
    worker = await house.add(tokens_per_step=tokens_per_step)
    first = min(TEXT.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in TEXT)
    body = BODY | {"max_tokens": 300, "stop": stop}
    if stream:
        chunks = await chunks_of(house, "/v1/completions", body)
        assert chunks[-1] == "[DONE]"
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        choice = (await house.http.post("/v1/completions", json=body)).json()["choices"][0]
        text = choice["text"]
        assert choice["finish_reason"] == "stop"
    assert text == TEXT[:first]
    await worker.until(lambda: worker.cancels, "the cancel")
    assert worker.cancels[0].key == worker.submits[0].key
    # Negative control: without the stop string the text goes on past it.
    whole = (await house.http.post("/v1/completions", json=BODY | {"max_tokens": 60})).json()
    assert len(whole["choices"][0]["text"]) > first


def test_stop_matcher_holds_back_only_what_may_become_a_stop_string():
    matcher = StopMatcher(("abc", "bd"))
    assert matcher.push("xa") == ("x", False)
    assert matcher.push("b") == ("", False)
    assert matcher.push("b") == ("ab", False)
    assert matcher.push("d tail") == ("", True)
    matcher = StopMatcher(("abc",))
    assert matcher.push("ab") == ("", False)
    assert matcher.flush() == "ab"


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_eos_ends_the_answer_and_is_not_shown(open_house, ignore_eos):
    house = await open_house()
    script = [*house.script[:3], house.tokenizer.eos_token_ids[0], *house.script[3:20]]
    await house.add(token=lambda p: script[p - 2])
    body = BODY | {"ignore_eos": ignore_eos}
    answer = (await house.http.post("/v1/completions", json=body)).json()
    choice, usage = answer["choices"][0], answer["usage"]
    if ignore_eos:
        assert (choice["finish_reason"], usage["completion_tokens"]) == ("length", 12)
        assert choice["text"] == house.tokenizer.decode(house.script[:11])
    else:
        assert (choice["finish_reason"], usage["completion_tokens"]) == ("stop", 4)
        assert choice["text"] == house.tokenizer.decode(house.script[:3])


@pytest.mark.parametrize("tokens_per_step", [1, 2, 5])
async def test_unicode_over_token_borders(open_house, tokens_per_step):
    text = "naïve café 日本語 👩‍👩‍👧‍👦 €"
    house = await open_house(text)
    await house.add(tokens_per_step=tokens_per_step)
    body = BODY | {"max_tokens": len(house.script)}
    chunks = (await chunks_of(house, "/v1/completions", body))[:-1]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)
    cut = await house.http.post(
        "/v1/completions", json=body | {"max_tokens": len(house.script) - 1}
    )
    assert cut.json()["choices"][0]["text"] == house.tokenizer.decode(house.script[:-1])
    assert cut.json()["choices"][0]["text"] == text[:-1] + "\ufffd"  # cut in mid-character


async def test_hashes_are_computed_with_the_fleets_key_and_the_salt(house):
    prompt = list(range(10, 20))
    await house.http.post("/v1/completions", json=BODY | {"prompt": prompt, "cache_salt": "t1"})
    submit = house.workers[0].submits[0]
    expected: list[bytes] = []
    HASHER.extend(expected, prompt, tenant_salt("", "t1"))
    assert list(submit.hashes) == expected
    assert len(expected) == 2
    unsalted: list[bytes] = []
    HASHER.extend(unsalted, prompt)
    assert unsalted != expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_at_the_worker(house, stream):
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(2)
    body = BODY | {"stream": stream}
    async with httpx.AsyncClient(base_url=house.url, timeout=BOUND_S) as http:
        request = asyncio.create_task(http.post("/v1/completions", json=body))
        await worker.until(lambda: worker.num_sent == 2, "two tokens")
        assert worker.cancels == []
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await worker.until(lambda: worker.cancels, "the cancel")
    assert worker.cancels[0].key == worker.submits[0].key
    await house.until(lambda: house.app.dispatcher.core.num_live == 0, "nothing live")


async def test_a_slow_client_stalls_only_itself(open_house):
    house = await open_house()
    worker = await house.add(tokens_per_step=2)
    body = BODY | {"max_tokens": 480, "stream": True, "logprobs": 5}
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, ("127.0.0.1", house.app.http_port))
    await house.until(lambda: len(connections(house)) == 1, "the connection")
    for transport in connections(house):
        sender = transport.get_extra_info("socket")
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    await loop.sock_sendall(slow, f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    await worker.until(lambda: worker.num_sent == 480, "all of the slow one's tokens")
    await house.until(lambda: any(flow.write_paused for flow in flows(house)), "a stalled writer")
    # It has read nothing, and another client is served in full.
    answer = await house.http.post("/v1/completions", json=BODY)
    assert answer.json()["usage"]["completion_tokens"] == 12
    assert any(flow.write_paused for flow in flows(house))
    received = b""
    async with asyncio.timeout(BOUND_S):
        while b"data: [DONE]" not in received:
            received += await loop.sock_recv(slow, 65536)
    slow.close()
    tokens = [
        token
        for line in received.split(b"\n")
        if line.startswith(b'data: {"id"')
        for token in json.loads(line[6:])["choices"][0]["logprobs"]["tokens"]
    ]
    assert len(tokens) == 480


def connections(house):
    return [c.transport for c in house.app._http_server.server_state.connections]


def flows(house):
    return [c.flow for c in house.app._http_server.server_state.connections]


async def test_small_writes_do_not_wait_for_delayed_acks(house):
    await house.http.get("/health")
    options = [
        transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for transport in connections(house)
    ]
    assert options
    assert all(options)


async def test_records_models_workers_and_metrics(house):
    answer = await house.http.post("/v1/completions", json=BODY, headers={"x-request-id": "rec-1"})
    assert answer.status_code == 200
    for shown in ("rec-1", "cmpl-rec-1"):
        record = (await house.admin.get(f"/v1/disagg/requests/{shown}")).json()
        assert record["request_id"] == "rec-1"
        assert record["outcome"] == "length"
        assert record["num_tokens"] == 12
        assert record["generations"][0]["local"] is True
        assert record["generations"][0]["prefill"] == {"worker_id": "w1", "epoch": "e1"}
    workers = (await house.admin.get("/v1/disagg/workers")).json()["workers"]
    assert [(w["info"]["incarnation"]["worker_id"], w["ready"]) for w in workers] == [("w1", True)]
    async with client(house) as api:
        assert [model.id async for model in api.models.list()] == ["tiny"]
        assert (await api.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("other")
        with pytest.raises(openai.BadRequestError) as caught:
            await api.completions.create(model="tiny", prompt=PROMPT, n=0)
        assert caught.value.param == "n"
    metrics = (await house.admin.get("/metrics")).text
    for line in (
        'disagg_requests_total{model_name="tiny",outcome="length",tenant=""} 1.0',
        'disagg_requests_total{model_name="tiny",outcome="invalid_value",tenant=""} 1.0',
        'disagg_generation_tokens_total{model_name="tiny",tenant=""} 12.0',
        'disagg_time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        "disagg_inter_token_latency_seconds_count",
        'disagg_worker_num_blocks_free{model_name="tiny",role="both",worker="w1"} 100',
        'disagg_worker_other_total{model_name="tiny",role="both",worker="w1",name="steps"} 3',
        'disagg_routing_plans_total{kind="local",model_name="tiny"} 1.0',
        'disagg_requests_live{model_name="tiny"} 0.0',
    ):
        assert line in metrics, f"{line} is not in\n{metrics}"
    health = (await house.http.get("/health")).json()
    assert health["num_workers_ready"] == 1


async def test_finished_records_are_bounded(open_house):
    house = await open_house(records_max=2)
    await house.add()
    for index in range(4):
        headers = {"x-request-id": f"r{index}"}
        await house.http.post("/v1/completions", json=BODY, headers=headers)
    found = [
        (await house.admin.get(f"/v1/disagg/requests/r{index}")).status_code for index in range(4)
    ]
    assert found == [404, 404, 200, 200]


async def test_long_prompts_are_tokenised_away_from_the_event_loop(open_house, monkeypatch):
    house = await open_house()
    worker = await house.add(max_model_tokens=5000)
    encode, threads = house.app._tokenizer.encode, []

    def watched(text, **more):
        threads.append(threading.get_ident())
        return encode(text, **more)

    monkeypatch.setattr(house.app._tokenizer, "encode", watched)
    for text in ("short", "the cat sat " * 200):
        response = await house.http.post("/v1/completions", json=BODY | {"prompt": text})
        assert response.status_code == 200
        assert worker.submits[-1].token_ids == encode(text)
    assert threads[0] == threading.get_ident()
    assert threads[1] != threading.get_ident()
