"""Bad input: the status, the field, the OpenAI schema, and nothing reaches a worker."""

import asyncio
import gzip
import json

import pytest

COMPLETION = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def bad(endpoint, change, param, status=400, code="invalid_value"):
    return pytest.param(endpoint, change, param, status, code, id=f"{endpoint}-{change}"[:90])


USER = {"role": "user", "content": "hi"}
CASES = [
    *(
        bad(endpoint, {field: value}, field)
        for endpoint in ("completions", "chat/completions")
        for field, value in [
            ("max_tokens", 0),
            ("max_tokens", "3"),
            ("max_tokens", 1.5),
            ("max_tokens", True),
            ("temperature", -0.1),
            ("temperature", 2.1),
            ("temperature", "1"),
            ("top_p", 0),
            ("top_p", 1.1),
            ("top_k", -2),
            ("seed", 2**63),
            ("seed", 1.5),
            ("min_tokens", -1),
            ("min_tokens", 17),
            ("min_tokens", True),
            ("stop_token_ids", 5),
            ("stop_token_ids", [320]),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", ["5"]),
            ("stop_token_ids", [True]),
            ("stop_token_ids", [5] * 129),
            ("prompt_logprobs", -1),
            ("prompt_logprobs", 21),
            ("prompt_logprobs", True),
            ("stop", ["a"] * 17),
            ("stop", ""),
            ("stop", [1]),
            ("stop", ["x" * 2000]),
            ("stream", "yes"),
            ("stream_options", 1),
            ("ignore_eos", 1),
            ("cache_salt", 5),
            ("n", 0),
            ("n", 257),
            ("n", True),
            ("best_of", 0),
            ("priority", 0.5),
            ("priority", 2**63),
            ("add_special_tokens", 1),
            ("skip_special_tokens", "no"),
            ("return_token_ids", 1),
            ("use_beam_search", True),
            ("include_stop_str_in_output", True),
            ("length_penalty", 2.0),
            ("truncate_prompt_tokens", 5),
            ("allowed_token_ids", [5]),
            ("frequency_penalty", 2.1),
            ("frequency_penalty", "1"),
            ("presence_penalty", -2.1),
            ("presence_penalty", True),
            ("repetition_penalty", 0),
            ("repetition_penalty", 11),
            ("min_p", -0.1),
            ("min_p", 1.1),
            ("logit_bias", [5]),
            ("logit_bias", {"5": 101}),
            ("logit_bias", {"5": -(10**400)}),
            ("logit_bias", {"5": "1"}),
            ("logit_bias", {"5": True}),
            ("logit_bias", {"x": 1}),
            ("logit_bias", {" 5": 1}),
            ("logit_bias", {"-5": 1}),
            ("logit_bias", {"320": 1}),
            ("logit_bias", {"4294967296": 1}),
            ("logit_bias", {str(token): 1 for token in range(1025)}),
            ("response_format", "json_object"),
            ("tools", {"type": "function"}),
            ("no_such_field", 1),
            ("model", 5),
        ]
    ),
    bad("completions", {"model": "other"}, "model", 404, "model_not_found"),
    bad("chat/completions", {"model": "other"}, "model", 404, "model_not_found"),
    bad("completions", {"model": None}, "model"),
    bad("completions", {"prompt": ""}, "prompt"),
    bad("completions", {"prompt": []}, "prompt"),
    bad("completions", {"prompt": None}, "prompt"),
    bad("completions", {"prompt": 5}, "prompt"),
    bad("completions", {"prompt": ["a", 5]}, "prompt"),
    bad("completions", {"prompt": [[5], ["a"]]}, "prompt"),
    bad("completions", {"prompt": [[[5]]]}, "prompt"),
    bad("completions", {"prompt": [[5], []]}, "prompt[1]"),
    bad("completions", {"prompt": ["a", ""]}, "prompt[1]"),
    bad("completions", {"prompt": ["a"] * 257}, "prompt"),
    bad("completions", {"best_of": 257}, "best_of"),
    bad("completions", {"n": 3, "best_of": 2}, "best_of"),
    bad("chat/completions", {"best_of": 2}, "best_of"),
    bad("completions", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    bad(
        "completions",
        {"stream": True, "stream_options": {"continuous_usage_stats": 1}},
        "stream_options.continuous_usage_stats",
    ),
    bad("completions", {"prompt": [1, "a"]}, "prompt"),
    bad("completions", {"prompt": [1, True]}, "prompt"),
    bad("completions", {"prompt": [-1]}, "prompt"),
    bad("completions", {"prompt": [320]}, "prompt"),
    bad("completions", {"prompt": [2**40]}, "prompt"),
    bad("completions", {"logprobs": 21}, "logprobs"),
    bad("completions", {"logprobs": True}, "logprobs"),
    bad("completions", {"echo": "yes"}, "echo"),
    bad("chat/completions", {"echo": True}, "echo"),
    bad(
        "completions",
        {"stream": False, "stream_options": {"include_usage": True}},
        "stream_options",
    ),
    bad("completions", {"suffix": "x"}, "suffix"),
    bad("completions", {"prompt": [5] * 512}, "prompt", code="context_length_exceeded"),
    bad("completions", {"prompt": "x" * 100_000}, "prompt", code="context_length_exceeded"),
    bad("completions", {"max_tokens": 511}, "max_tokens", code="context_length_exceeded"),
    bad("chat/completions", {"messages": []}, "messages"),
    bad("chat/completions", {"messages": "hi"}, "messages"),
    bad("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    bad("chat/completions", {"messages": [USER, {"role": "x", "content": ""}]}, "messages[1].role"),
    bad("chat/completions", {"messages": [USER | {"content": 5}]}, "messages[0].content"),
    bad("chat/completions", {"messages": [USER | {"x": 5}]}, "messages[0].x"),
    bad("chat/completions", {"messages": [USER | {"type": "image"}]}, "messages[0].type"),
    bad(
        "chat/completions",
        {"messages": [USER | {"content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
    ),
    bad(
        "chat/completions",
        {"messages": [USER | {"audio": {"id": "1"}}]},
        "messages[0].audio",
    ),
    bad("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
    bad("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    bad("chat/completions", {"logprobs": 2}, "logprobs"),
    bad("chat/completions", {"max_completion_tokens": 4}, "max_tokens"),
]


def check_error(response, status, param, code):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["code"] == code
    assert error["message"]
    assert param is None or error["message"].startswith(f"{param}: ")


async def test_every_bad_field_is_named_and_reaches_no_worker(house):
    worker = house.workers[0]
    failures = []
    for case in CASES:
        endpoint, change, param, status, code = case.values
        base = COMPLETION if endpoint == "completions" else CHAT
        for stream in (False, True):
            body = {"stream": stream} | base | change
            response = await house.http.post(f"/v1/{endpoint}", json=body)
            try:
                check_error(response, status, param, code)
            except AssertionError as error:
                failures.append(f"{case.id} stream={stream}: {error}")
    assert not failures, "\n".join(failures)
    assert worker.submits == []
    # Negative control: the same bodies without the change do reach it.
    assert (await house.http.post("/v1/completions", json=COMPLETION)).status_code == 200
    assert (await house.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert len(worker.submits) == 2


async def test_harmless_and_neutral_fields_are_accepted(house):
    neutral = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "n": 1,
        "best_of": 1,
        "echo": False,
        "suffix": None,
        "add_special_tokens": None,
        "skip_special_tokens": True,
        "return_token_ids": False,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "include_stop_str_in_output": False,
        "spaces_between_special_tokens": True,
        "return_tokens_as_token_ids": False,
        "bad_words": [],
        "allowed_token_ids": None,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "min_p": 0,
        "repetition_penalty": None,
        "response_format": {"type": "text"},
        "tools": None,
        "stop": None,
        "seed": -5,
        "top_k": -1,
        "stream_options": None,
    }
    response = await house.http.post("/v1/completions", json=COMPLETION | neutral)
    assert response.status_code == 200, response.text
    echoed = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    messages = [USER, echoed, USER | {"name": "bob"}, USER | {"type": "text"}]
    body = CHAT | {"messages": messages, "max_completion_tokens": 3, "stop": ["\n"] * 16}
    response = await house.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/tiny", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/", 404, "not_found"),
        ("GET", "/metrics", 404, "not_found"),  # on the admin port
        ("POST", "/reset_prefix_cache", 404, "not_found"),
        ("GET", "/v1/disagg/requests/unknown", 404, "not_found"),
    ],
)
async def test_routes(house, method, path, status, code):
    check_error(await house.http.request(method, path), status, None, code)


async def test_bodies_that_are_no_request(house):
    async def post(content, content_type="application/json", **headers):
        headers = {"content-type": content_type} | headers
        return await house.http.post("/v1/completions", content=content, headers=headers)

    for content in (b"", b"{", b"[1]", b'"x"', b'{"model": NaN}', b'{"a": "\xff"}', b"[" * 5000):
        check_error(await post(content), 400, None, "invalid_value")
    good = json.dumps(COMPLETION).encode()
    response = await post(good, "text/plain")
    check_error(response, 400, "content-type", "invalid_value")
    response = await post(gzip.compress(good), **{"content-encoding": "gzip"})
    check_error(response, 400, "content-encoding", "invalid_value")
    assert house.workers[0].submits == []
    assert (await post(good, **{"content-encoding": "identity"})).status_code == 200
    assert (await post(good, "application/json; charset=utf-8")).status_code == 200


async def test_a_body_over_the_limit_is_refused_and_the_router_lives_on(open_house):
    house = await open_house(body_bytes_max=10_000)
    worker = await house.add()
    big = json.dumps(COMPLETION | {"prompt": "x" * 1_000_000}).encode()

    async def chunks():
        for start in range(0, len(big), 65536):
            yield big[start : start + 65536]

    for content in (big, chunks()):
        response = await house.http.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        check_error(response, 413, None, "request_too_large")
    assert worker.submits == []
    fits = json.dumps(COMPLETION).encode() + b" " * 9_000
    headers = {"content-type": "application/json"}
    response = await house.http.post("/v1/completions", content=fits, headers=headers)
    assert response.status_code == 200


async def test_without_workers(open_house):
    house = await open_house()
    assert (await house.http.get("/health")).status_code == 200
    assert (await house.http.get("/ready")).status_code == 503
    response = await house.http.post("/v1/completions", json=COMPLETION)
    check_error(response, 503, None, "worker_unavailable")
    response = await house.http.post("/v1/completions", json=COMPLETION | {"top_p": 7})
    check_error(response, 400, "top_p", "invalid_value")
    await house.add()
    assert (await house.http.get("/ready")).status_code == 200


async def test_more_than_requests_max_is_refused_with_retry_after(open_house):
    house = await open_house(requests_max=1)
    gate = asyncio.Semaphore(0)
    worker = await house.add(gate=gate)
    first = asyncio.create_task(house.http.post("/v1/completions", json=COMPLETION))
    await worker.until(lambda: worker.submits, "the first submit")
    response = await house.http.post("/v1/completions", json=COMPLETION)
    check_error(response, 429, None, "rate_limit_exceeded")
    assert response.headers["retry-after"] == "1"
    for _ in range(3):
        gate.release()
    assert (await first).status_code == 200


async def test_a_live_request_id_is_refused_to_another_and_a_finished_one_is_free_again(house):
    worker = house.workers[0]
    worker.gate = asyncio.Semaphore(0)
    headers = {"x-request-id": "my-id.1"}
    first = asyncio.create_task(
        house.http.post("/v1/completions", json=COMPLETION, headers=headers)
    )
    await worker.until(lambda: worker.submits, "the first submit")
    another = COMPLETION | {"prompt": "another one"}
    response = await house.http.post("/v1/completions", json=another, headers=headers)
    check_error(response, 409, "request_id", "duplicate_request_id")
    for _ in range(6):
        worker.gate.release()
    answer = await first
    assert answer.headers["x-request-id"] == "my-id.1"
    assert answer.json()["id"] == "cmpl-my-id.1"
    again = await house.http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert again.status_code == 200
