"""What a client gets wrong is refused by name, and nothing of it reaches a worker."""

import json
from typing import Any

import pytest

from tests.process.harness import MODEL
from tests.process.served_model import ServedModel, assert_exact

pytestmark = pytest.mark.timeout(600)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": MODEL, "prompt": "a prompt"}
MESSAGES = {"model": MODEL, "messages": [{"role": "user", "content": "a message"}]}
TOO_LONG = [20] * 4096

BAD_BODIES: list[tuple[str, dict[str, Any], int, str]] = [
    (COMPLETIONS, PROMPT | {"model": "another"}, 404, "model"),
    (COMPLETIONS, {"prompt": "a prompt"}, 400, "model"),
    (COMPLETIONS, PROMPT | {"model": 3}, 400, "model"),
    (COMPLETIONS, {"model": MODEL}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": None}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": {"a": 1}}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": ["one", 2]}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": [20, "x"]}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": [20, 320]}, 400, "prompt"),  # one past the vocabulary
    (COMPLETIONS, PROMPT | {"prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": [1.5]}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": [True]}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": TOO_LONG}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": "long " * 100_000}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"prompt": TOO_LONG[:-10], "max_tokens": 11}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": -1}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": "12"}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": 1.5}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": 2**31}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"temperature": -0.1}, 400, "temperature"),
    (COMPLETIONS, PROMPT | {"temperature": 2.1}, 400, "temperature"),
    (COMPLETIONS, PROMPT | {"temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, PROMPT | {"top_p": 0}, 400, "top_p"),
    (COMPLETIONS, PROMPT | {"top_p": 1.1}, 400, "top_p"),
    (COMPLETIONS, PROMPT | {"top_k": -2}, 400, "top_k"),
    (COMPLETIONS, PROMPT | {"seed": 2**63}, 400, "seed"),
    (COMPLETIONS, PROMPT | {"logprobs": 21}, 400, "logprobs"),
    (COMPLETIONS, PROMPT | {"logprobs": True}, 400, "logprobs"),
    (COMPLETIONS, PROMPT | {"stop": [f"stop {number}" for number in range(17)]}, 400, "stop"),
    (COMPLETIONS, PROMPT | {"stop": 5}, 400, "stop"),
    (COMPLETIONS, PROMPT | {"stream": "yes"}, 400, "stream"),
    (COMPLETIONS, PROMPT | {"stream_options": {}}, 400, "stream_options"),
    (COMPLETIONS, PROMPT | {"n": 0}, 400, "n"),
    (COMPLETIONS, PROMPT | {"echo": "yes"}, 400, "echo"),
    (COMPLETIONS, PROMPT | {"max_tokenz": 3}, 400, "max_tokenz"),
    (CHAT, MESSAGES | {"model": "another"}, 404, "model"),
    (CHAT, {"model": MODEL}, 400, "messages"),
    (CHAT, MESSAGES | {"messages": []}, 400, "messages"),
    (CHAT, MESSAGES | {"messages": "hello"}, 400, "messages"),
    (CHAT, MESSAGES | {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, MESSAGES | {"messages": [{"role": "x", "content": ""}]}, 400, "messages[0].role"),
    (CHAT, MESSAGES | {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, MESSAGES | {"top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, MESSAGES | {"tools": [{"type": "function"}]}, 400, "tools[0].function"),
]
"""Path, body, status, the field that the error must name."""

BAD_JSON = (b"", b"{", b"[1]", b'"text"', b'{"model": "tiny", "prompt": "a" ', b"\xff\xfe{}")


def assert_names(answer: Any, status: int, param: str | None) -> None:
    """OpenAI's error schema, all four fields."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    assert error["param"] == param
    assert param is None or param in error["message"]


def touched(served: ServedModel) -> list[tuple[dict[str, int], int, int]]:
    """What has reached the workers, and what their pools and caches look like."""
    out = []
    for name in ("p0", "d0"):
        status = served.cluster.status(name)
        counts = served.cluster.counts(name)
        out.append((counts, status.stats.num_blocks_free, status.kv_sequence))
    return out


def test_each_is_refused_by_name_and_reaches_no_worker(gemma3: ServedModel) -> None:
    before = touched(gemma3)
    for path, body, status, param in BAD_BODIES:
        answer = gemma3.cluster.http.post(path, json=body)
        try:
            assert_names(answer, status, param)
        except AssertionError as error:
            error.add_note(f"{path} {json.dumps(body)[:200]}")
            raise
    assert touched(gemma3) == before
    # Control: the counts see what does reach a worker.
    expected = gemma3.prompt(40, 3)
    assert_exact(gemma3.ask(expected), expected)
    for (counts, _, kv_sequence), (old_counts, _, old_kv_sequence) in zip(
        touched(gemma3), before, strict=True
    ):
        assert counts["messages"] > old_counts["messages"]
        assert counts["steps"] > old_counts["steps"]
        assert kv_sequence > old_kv_sequence


def test_what_is_no_json_object_is_refused(gemma3: ServedModel) -> None:
    before = touched(gemma3)
    for path in (COMPLETIONS, CHAT):
        for body in BAD_JSON:
            answer = gemma3.cluster.http.post(
                path, content=body, headers={"content-type": "application/json"}
            )
            assert_names(answer, 400, None)
        answer = gemma3.cluster.http.post(path, content=b"{}", headers={"content-type": "text/x"})
        assert_names(answer, 400, "content-type")
    nan = json.dumps(PROMPT | {"temperature": float("nan")}).encode()
    headers = {"content-type": "application/json"}
    assert gemma3.cluster.http.post(COMPLETIONS, content=nan, headers=headers).status_code == 400
    assert touched(gemma3) == before


def test_the_id_of_a_live_request_is_refused(gemma3: ServedModel) -> None:
    """That request goes on untouched."""
    expected = gemma3.prompt(40, 30)
    held = gemma3.cluster.tell("p0", "hold steps")
    first = gemma3.ask_later(expected, "twice")
    gemma3.cluster.wait_told("p0", "held steps", held)
    before = touched(gemma3)
    answer = gemma3.cluster.http.post(COMPLETIONS, json=PROMPT, headers={"x-request-id": "twice"})
    assert_names(answer, 409, "request_id")
    assert touched(gemma3) == before
    gemma3.cluster.tell("p0", "pass steps")
    assert_exact(first.result(60), expected)
