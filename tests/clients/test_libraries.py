"""openai, LangChain and LiteLLM: what their users write gives the tokens of our own requests."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from tests.checkpoints import reference_generate
from tests.clients.environments import ClientError, call, environment_of
from tests.clients.served import Served

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1_800)]

LIBRARIES = {
    "openai_calls.py": "openai",
    "langchain_calls.py": "openai",
    "litellm_calls.py": "litellm",
}
PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": 1}


def chat(served: Served, given: dict[str, Any], **more: Any) -> Any:
    """Our own chat; the first choice."""
    body = {"messages": given["messages"], "max_tokens": 12, "temperature": 0} | more
    return served.post("/v1/chat/completions", **body)["choices"][0]


def chat_text(served: Served, given: dict[str, Any], **more: Any) -> str:
    text: str = chat(served, given, **more)["message"]["content"]
    return text


def own_call(served: Served, given: dict[str, Any], left_out: set[str]) -> str:
    """Arguments of a forced call, by our own request, with less of the schema."""
    schema = {name: part for name, part in given["schema"].items() if name not in left_out}
    name = given["tools"][0]["function"]["name"]
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}}]
    choice = {"type": "function", "function": {"name": name}}
    told = chat(served, given, tools=tools, tool_choice=choice, max_tokens=200)["message"]
    arguments: str = told["tool_calls"][0]["function"]["arguments"]
    return arguments


def is_call(arguments: object, given: dict[str, Any]) -> bool:
    """Whether they follow the schema."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
        jsonschema.validate(found, given["schema"])
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def test_openai(served: Served, given: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(served.checkpoint / "tokenizer.json"))
    given["token_ids"] = tokenizer.encode(given["prompt"]).ids
    before = served.num_handed_over()
    found = call(environment_of("openai"), "openai_calls.py", given, tmp_path)
    assert served.num_handed_over() > before
    assert found["model"] == "tiny"

    ids, logprobs, gap = reference_generate(served.checkpoint, given["token_ids"], 12)
    assert gap > 1e-3
    text = tokenizer.decode(ids)
    (one,) = found["completion"]["choices"]
    assert (one["text"], one["finish_reason"]) == (text, "length")
    assert one["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
    assert found["completion"]["usage"]["completion_tokens"] == 12
    chunks = found["completion_stream"]
    assert "".join(part["choices"][0]["text"] for part in chunks if part["choices"]) == text
    assert chunks[-1]["usage"]["prompt_tokens"] == len(given["token_ids"])
    assert found["token_ids"]["choices"][0]["text"] == text
    second = served.complete(given["prompt"][5:], 12)["text"]
    assert [one["text"] for one in found["two_prompts"]["choices"]] == [text, second]
    echoed = found["echo"]["choices"][0]
    assert echoed["text"].startswith(given["prompt"])
    assert len(echoed["logprobs"]["token_logprobs"]) == len(given["token_ids"]) + 1
    assert echoed["logprobs"]["token_logprobs"][0] is None
    own = [
        served.complete(given["prompt"], 12, temperature=1, seed=seed)["text"] for seed in (7, 8)
    ]
    assert [one["text"] for one in found["two_choices"]["choices"]] == own
    assert sorted(one["text"] for one in found["two_choices_again"]["choices"]) == sorted(own)
    biased = PENALTIES | {"logit_bias": {"40": 5}}
    own_text = served.complete(given["prompt"], 12, **biased)["text"]
    assert found["penalties"]["choices"][0]["text"] == own_text != text

    told = chat_text(served, given)
    assert found["chat"]["choices"][0]["message"]["content"] == told
    tokens = found["chat"]["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in tokens) == told
    assert {len(one["top_logprobs"]) for one in tokens} == {3}
    deltas = [part["choices"][0]["delta"].get("content") for part in found["chat_stream"]]
    assert "".join(delta or "" for delta in deltas) == told
    assert [one["message"]["content"] for one in found["chat_two"]["choices"]] == [told, told]
    calls = [
        found[name]["choices"][0]["message"]["tool_calls"][0]["function"]
        for name in ("tool_call", "tool_call_streamed")
    ]
    assert [one["name"] for one in calls] == ["get_weather"] * 2
    assert calls[0]["arguments"] == calls[1]["arguments"]
    assert is_call(calls[0]["arguments"], given)
    assert found["after_the_tool"]["choices"][0]["message"]["content"]
    assert set(found["parsed"]) == {"name", "size"}
    # Random weights seldom end an object: what is there is the beginning of one.
    assert found["json_object"]["choices"][0]["message"]["content"].startswith("{")
    assert found["response"]
    assert found["refused"] == {"key": "AuthenticationError", "embeddings": 404, "model": 404}


def test_langchain(served: Served, given: dict[str, Any], tmp_path: Path) -> None:
    found = call(environment_of("openai"), "langchain_calls.py", given, tmp_path)
    told = chat_text(served, given)
    assert (found["invoke"], found["stream"], found["batch"]) == (told, told, [told, told])
    assert found["usage"]["output_tokens"] == 12
    assert "".join(found["logprobs"]) == told
    assert found["penalties"] == chat_text(served, given, **PENALTIES) != told
    for name in ("tool_calls", "tool_calls_streamed"):
        (one,) = found[name]
        assert one["name"] == "get_weather"
        assert is_call(one["args"], given)
    assert found["after_the_tool"]
    turns = [
        *given["messages"],
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ]
    assert found["history"] == chat_text(served, given, messages=turns)
    assert is_call(found["json_schema"], given)
    assert is_call(found["function_calling"], given)
    text = served.complete(given["prompt"], 12)["text"]
    second = served.complete(given["prompt"][5:], 12)["text"]
    assert found["completion"] == found["completion_stream"] == text
    assert found["two_prompts"] == [text, second]


def test_litellm(served: Served, given: dict[str, Any], tmp_path: Path) -> None:
    found = call(environment_of("litellm"), "litellm_calls.py", given, tmp_path)
    told = chat_text(served, given)
    for provider in ("openai", "hosted_vllm"):
        one = found[provider]
        assert (one["chat"], one["stream"], one["two"]) == (told, told, [told, told])
        assert one["penalties"] == chat_text(served, given, **PENALTIES)
        # For vLLM's servers LiteLLM leaves "additionalProperties" out of a tool's schema.
        left_out = {"additionalProperties"} if provider == "hosted_vllm" else set()
        assert one["call"] == own_call(served, given, left_out)
        assert is_call(one["call"], given) or left_out
        assert is_call(one["shaped"], given)
    text = served.complete(given["prompt"], 12)["text"]
    assert found["completion"] == text
    assert found["two_prompts"] == [text, served.complete(given["prompt"][5:], 12)["text"]]


@pytest.mark.parametrize("program", LIBRARIES)
@pytest.mark.parametrize("fault", ["wrong key", "nobody serves"])
def test_a_client_that_is_not_served_fails(
    program: str, fault: str, given: dict[str, Any], tmp_path: Path
) -> None:
    """Control: the tests above cannot pass without the router."""
    environment = environment_of(LIBRARIES[program])
    given |= {"key": "sk-wrong"} if fault == "wrong key" else {"url": "http://127.0.0.1:1/v1"}
    given["token_ids"] = [1, 2, 3]
    reason = "401|AuthenticationError" if fault == "wrong key" else "[Cc]onnection"
    with pytest.raises(ClientError, match=reason):
        call(environment, program, given, tmp_path)
