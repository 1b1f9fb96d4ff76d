"""Sends the demo's requests through the HTTP port, as any client would, and watches the clock."""

import time
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI

from demo.prompts import DemoPrompt

MAX_TOKENS = 32
TIMEOUT_S = 60.0
_RECORD_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt.

    Attributes:
        text: the streamed text, put together.
        num_tokens: generated tokens.
        ttft_ms: from sending the request to the first token.
        tpot_ms: mean time per token after the first; 0 with one token.
        record: the router's record of the request.
    """

    prompt: DemoPrompt
    text: str
    num_prompt_tokens: int
    num_tokens: int
    ttft_ms: float
    tpot_ms: float
    record: dict[str, Any]


def ask(
    client: OpenAI, http: httpx.Client, model: str, prompt: DemoPrompt, name: str = ""
) -> Answer:
    """Stream one answer and fetch the record of the request, called ``name`` or as the prompt."""
    headers = {"X-Request-Id": f"demo-{name or prompt.name}"}
    usage_too: Any = {"include_usage": True}
    start_s = time.perf_counter()
    stream: Any
    if prompt.kind == "completion":
        stream = client.completions.create(
            model=model,
            prompt=prompt.text,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options=usage_too,
            extra_headers=headers,
        )
    else:
        messages: Any = [{"role": role, "content": text} for role, text in prompt.messages]
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options=usage_too,
            extra_headers=headers,
        )
    text, usage = "", None
    first_s = last_s = start_s
    for chunk in stream:
        usage = chunk.usage or usage
        piece = _text_of(chunk)
        if piece:
            last_s = time.perf_counter()
            first_s = first_s if text else last_s
            text += piece
    assert usage is not None
    num_after = max(1, usage.completion_tokens - 1)
    return Answer(
        prompt,
        text,
        usage.prompt_tokens,
        usage.completion_tokens,
        (first_s - start_s) * 1000,
        (last_s - first_s) * 1000 / num_after,
        _record(http, headers["X-Request-Id"]),
    )


def _text_of(chunk: Any) -> str:
    if not chunk.choices:
        return ""
    choice = chunk.choices[0]
    delta = getattr(choice, "delta", None)
    return (choice.text if delta is None else delta.content) or ""


def _record(http: httpx.Client, request_id: str) -> dict[str, Any]:
    """The router's record; it is complete once the outcome stands in it."""
    deadline = time.monotonic() + _RECORD_WAIT_S
    while True:
        record: dict[str, Any] = http.get(f"/v1/disagg/requests/{request_id}").json()
        if record.get("outcome") or time.monotonic() > deadline:
            return record
        time.sleep(0.02)
