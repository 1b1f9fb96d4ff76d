"""`min_tokens`, `stop_token_ids`, `logprobs` up to 20: what workers get, what clients see."""

import asyncio
from typing import Any

import grpc
import pytest

from disagg.messages.sampling import STOP_TOKENS_MAX
from disagg.router.text_stream import StopMatcher
from disagg.wire.v1 import router_pb2, router_pb2_grpc
from tests.unit.router.test_http_errors import check_error
from tests.unit.router.test_response_format import PATHS, SCHEMA, format_of

BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": 12}


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_worker_gets_them(house, path, body):
    eos = house.tokenizer.eos_token_ids
    asked = {"min_tokens": 2, "stop_token_ids": [300, 7, 300, eos[0]]}
    for more, stops in (
        ({}, (*eos, 300, 7)),
        ({"ignore_eos": True}, (300, 7, eos[0])),
        ({"min_tokens": None, "stop_token_ids": None}, eos),
    ):
        response = await house.http.post(path, json=body | asked | more)
        assert response.status_code == 200, response.text
        sampling = house.workers[0].submits[-1].sampling
        assert sampling.stop_token_ids == stops
        assert sampling.min_tokens == (0 if "min_tokens" in more else 2)
        assert sampling.eos_token_ids == ()
        assert sampling.num_prompt_logprobs is None


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_grammar_ends_by_the_checkpoints_own_tokens_alone(house, path, body):
    fields = {"response_format": format_of(SCHEMA), "stop_token_ids": [300]}
    response = await house.http.post(path, json=body | fields)
    assert response.status_code == 200, response.text
    sampling = house.workers[0].submits[-1].sampling
    assert sampling.eos_token_ids == house.tokenizer.eos_token_ids
    assert sampling.stop_token_ids == (*house.tokenizer.eos_token_ids, 300)
    refused = await house.http.post(path, json=body | fields | {"min_tokens": 1})
    check_error(refused, 400, "min_tokens", "invalid_value")


async def test_min_tokens_above_what_max_tokens_becomes(house):
    body = {"model": "tiny", "prompt": [5, 6], "min_tokens": 17}
    response = await house.http.post("/v1/completions", json=body)
    check_error(response, 400, "min_tokens", "invalid_value")
    assert "max_tokens=16" in response.text
    assert (await house.http.post("/v1/completions", json=body | {"min_tokens": 16})).is_success
    many = await house.http.post("/v1/completions", json=BODY | {"min_tokens": 13})
    check_error(many, 400, "min_tokens", "invalid_value")


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_a_stop_token_ends_the_answer_and_is_not_shown(house, ignore_eos):
    script = house.script
    stop = next(token for token in script[3:] if token not in script[:3])
    number = script.index(stop)
    body = BODY | {"stop_token_ids": [stop], "ignore_eos": ignore_eos}
    answer = (await house.http.post("/v1/completions", json=body)).json()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["text"]) == (
        "stop",
        house.tokenizer.decode(script[:number]),
    )
    assert answer["usage"]["completion_tokens"] == number + 1


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_a_stop_string_before_min_tokens_ends_nothing(open_house, tokens_per_step):
    house = await open_house("to be or not to be, or not to do")
    await house.add(tokens_per_step=tokens_per_step)
    whole = house.tokenizer.decode(house.script)
    first, second = whole.index("not"), whole.rindex("not")
    texts = [house.tokenizer.decode(house.script[: n + 1]) for n in range(len(house.script))]
    num_first = next(n for n, text in enumerate(texts, 1) if "not" in text)
    body = BODY | {"max_tokens": len(house.script), "stop": "not"}
    for min_tokens, end in ((0, first), (num_first - 1, first), (num_first, second)):
        response = await house.http.post("/v1/completions", json=body | {"min_tokens": min_tokens})
        (choice,) = response.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (whole[:end], "stop"), min_tokens


def test_a_stop_string_counts_where_it_ends():
    matcher = StopMatcher(("abc", "b"))
    assert matcher.push("xab", may_end=False) == ("x", False)
    assert matcher.push("c!") == ("x"[:0], True)  # it begins in what could not end yet
    matcher = StopMatcher(("abc", "b"))
    assert matcher.push("xab", may_end=False) == ("x", False)
    assert matcher.push("d") == ("abd", False)  # the shorter one ended before
    assert matcher.push("b") == ("", True)
    matcher = StopMatcher(("abc",))
    assert matcher.push("abc", may_end=False) == ("abc", False)
    assert matcher.push(" abc", may_end=True) == (" ", True)


@pytest.mark.parametrize("number", [0, 1, 20])
async def test_logprobs_up_to_twenty(house, number):
    response = await house.http.post("/v1/completions", json=BODY | {"logprobs": number})
    (choice,) = response.json()["choices"]
    assert house.workers[0].submits[-1].sampling.num_logprobs == number
    tops = choice["logprobs"]["top_logprobs"]
    assert len(tops) == 12
    if not number:
        assert tops == [None] * 12
    else:
        assert all(1 <= len(top) <= number for top in tops)  # some have the same text
        values = choice["logprobs"]["token_logprobs"]
        assert all(
            top[token] == value
            for token, top, value in zip(choice["logprobs"]["tokens"], tops, values, strict=True)
        )


async def test_grpc(house):
    def asked(**fields) -> router_pb2.GenerateRequest:
        request = router_pb2.GenerateRequest(model="tiny", token_ids=[5, 6, 9, 8])
        request.sampling.max_tokens = 3
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(request.sampling, name).extend(value)
            else:
                setattr(request.sampling, name, value)
        return request

    async with grpc.aio.insecure_channel(f"127.0.0.1:{house.app.grpc_port}") as channel:
        stub: Any = router_pb2_grpc.RouterStub(channel)
        good = asked(stop_token_ids=[300], min_tokens=2, num_prompt_logprobs=1)
        answers = [one async for one in stub.Generate(good)]
        sampling = house.workers[0].submits[-1].sampling
        assert sampling.stop_token_ids == (*house.tokenizer.eos_token_ids, 300)
        assert (sampling.min_tokens, sampling.num_prompt_logprobs) == (2, 1)
        assert [answer.HasField("prompt_logprobs") for answer in answers] == [
            True,
            *[False] * (len(answers) - 1),
        ]
        scores = answers[0].prompt_logprobs
        assert (scores.position, list(scores.logprobs)) == (1, [-101, -102, -103])
        assert list(scores.ranks) == [2, 3, 4]
        assert list(scores.top_token_ids) == [10] * 3
        for field, bad in (
            ("stop_token_ids", asked(stop_token_ids=[5] * (STOP_TOKENS_MAX + 1))),
            ("eos_token_ids", asked(eos_token_ids=[5])),
            ("num_prompt_tokens", asked(num_prompt_tokens=2)),
            ("num_prompt_logprobs", asked(num_prompt_logprobs=21)),
            ("min_tokens", asked(min_tokens=4)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
                async with asyncio.timeout(60):
                    [one async for one in stub.Generate(bad)]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
